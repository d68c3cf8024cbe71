"""A small training with all that is easily lost: momentum, BatchNorm, dropout, a schedule, clipping, checkpoints."""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import resile.training
from resile.training import Callback, ElasticLoop, ElasticModel, Iteration

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--pause", type=float, default=0.02, help="seconds after each iteration on a pool")
args = parser.parse_args()


class Pause(Callback):
    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        if "RESILE_OUTPUT_DIR" in os.environ:  # only a pool sets it
            time.sleep(args.pause)


def datasets() -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1009, 24, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3].prod(1) > 0).long()), None


resile.training.seed(5)
model = nn.Sequential(
    nn.Linear(24, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2000)
ElasticModel(model, datasets, nn.CrossEntropyLoss(), optimizer, lr_scheduler=schedule, callbacks=[Pause()]).train(
    epochs=args.epochs, batch_size=48, num_shards=12, clip_grad_norm=1.0, checkpoint_every=40
)
