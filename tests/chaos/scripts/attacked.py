"""A small training with all that is easily lost: momentum, BatchNorm, dropout, a schedule, clipping, checkpoints.

In a campaign each worker keeps an account of what it has committed, for the verdict (`resile/chaos/members.py`).
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import resile.training
from resile.chaos.members import COMMITS_VARIABLE
from resile.training import Callback, ElasticLoop, ElasticModel, Iteration
from resile_learner.session import current_session

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--pause", type=float, default=0.02, help="seconds after each iteration on a pool")
args = parser.parse_args()


class Pause(Callback):
    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        if Path(os.environ.get("RESILE_OUTPUT_DIR", "")).parent.parent.name == "jobs":  # of an agent
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


def keep_account(file: int) -> None:
    """Append a line to ``file`` after each update of the model, in one write."""

    def record(*_: object) -> None:
        session = current_session()
        params = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        line = {
            "time": time.time(),
            "job": session.job,
            "worker": session.view.me,
            "generation": session.view.generation,
            "iteration": schedule.last_epoch + 1,
            "params": hashlib.sha256(params).hexdigest()[:16],
        }
        os.write(file, json.dumps(line).encode() + b"\n")

    optimizer.register_step_post_hook(record)


if account := os.environ.get(COMMITS_VARIABLE):
    keep_account(os.open(account, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
ElasticModel(model, datasets, nn.CrossEntropyLoss(), optimizer, lr_scheduler=schedule, callbacks=[Pause()]).train(
    epochs=args.epochs, batch_size=48, num_shards=12, clip_grad_norm=1.0, checkpoint_every=40
)
