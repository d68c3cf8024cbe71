"""An ordinary loop that treats workers differently, by ``--mistake``."""

import argparse
import os
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import resile.training

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="")
parser.add_argument("--body", default="shard")
args = parser.parse_args()
mistake = args.mistake


class Data(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        in_training = sys._getframe(1).f_code.co_name != "dataset_digest"  # which would notice it before
        noise = os.getpid() if mistake == "dataset" and in_training else 0.0
        return self.x[index] + noise, (self.x[index].sum() > 0).long()


resile.training.seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms = [1.0]


def own(value: Tensor | float) -> float:
    """What differs between workers: what a worker computed by itself, or else its process."""
    return float(value) + (os.getpid() if args.body == "batch" else 0)


def scaled(gradient: Tensor) -> Tensor:
    norms[0] = 0.9 * norms[0] + 0.1 * gradient.norm().item()
    return gradient / norms[0]


if mistake == "hook":
    model[0].weight.register_hook(scaled)
loader = DataLoader(Data(), batch_size=12, shuffle=True)


class Best:
    """The least loss so far."""

    loss = 9.0

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss = state["loss"]


best = Best()
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
model, optimizer, loader, schedule = resile.training.prepare(
    model, optimizer, loader, schedule, num_shards=3, state={"best": best}, body=args.body
)
for epoch in loader.epochs(3):
    total = 0.0
    for inputs, targets in loader:
        if mistake == "body":
            inputs = inputs + os.getpid()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
        if loader.sync_gradients and mistake == "rate":
            optimizer.param_groups[0]["lr"] = 0.1 * own(loss)
        if loader.sync_gradients and mistake == "stop" and loader.iteration >= 5 and not loader.is_lowest_rank:
            loader.stop()
        if loader.sync_gradients and mistake == "buffer":
            model[1].running_mean.fill_(own(loss))
        if mistake == "end" and loader.sync_gradients and loader.iteration == 11 and not loader.is_lowest_rank:
            model[2].bias.data.add_(1.0)
    schedule.step(own(total) if mistake == "schedule" else loader.loss)
    best.loss = min(best.loss, loader.loss)
    if mistake == "state" or (mistake == "last state" and epoch == 2):
        best.loss = own(total)
