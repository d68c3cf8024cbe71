"""An ordinary loop: validation, a schedule and draws between epochs, accumulation, a last batch that few can share."""

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import resile.training

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--weighted", action="store_true")
parser.add_argument("--buckets", action="store_true", help="batches of samples of like lengths, by a batch sampler")
parser.add_argument("--kill", choices=("batch", "exchange", "epoch"), help="where the first worker kills itself")
parser.add_argument("--leave", choices=("batch", "epoch", "start"), help="where the loop is left")
parser.add_argument("--alone", action="store_true", help="only the worker of the lowest rank leaves it")
parser.add_argument("--killed", type=Path, help="the file that says that it did")
args = parser.parse_args()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int) -> None:
        self.x = torch.randn(size, 16, generator=torch.Generator().manual_seed(size))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(16), self.y[index]


class Buckets:
    """Batches of 3 to 40 samples, in random order."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        samples = torch.randperm(len(training))[:120]
        batches = samples.split([40, 3, 24, 25, 11, 17])
        return iter([batches[index].tolist() for index in torch.randperm(6)])


def leaves(place: str) -> bool:
    return args.leave == place and (loader.is_lowest_rank or not args.alone)


def kill(place: str, *, iteration: int) -> None:
    """End the first worker that comes here."""
    if args.kill == place and loader.iteration == iteration:
        try:
            args.killed.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


@torch.no_grad()
def validate(model: nn.Module) -> float:
    model.eval()
    return sum(F.cross_entropy(model(inputs), targets).item() for inputs, targets in validation) / len(validation)


resile.training.seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.7, patience=0)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5, enabled=args.bf16)
validation = DataLoader(Noisy(50), batch_size=10, shuffle=True)
# The last of six global batches has three samples: one shard, which other workers compute in vain.
training = Noisy(5 * 24 + 3)
weighted = WeightedRandomSampler([1 + index % 3 for index in range(len(training))], len(training))
order: dict[str, Any] = {"sampler": weighted} if args.weighted else {"shuffle": True}
cut: dict[str, Any] = {"accumulate": 6}
if args.buckets:
    order, cut = {"batch_sampler": Buckets()}, {"num_shards": 6, "body": "shard"}
else:
    order["batch_size"] = 4
loader = DataLoader(training, num_workers=args.num_workers, **order)

model, optimizer, loader, scheduler = resile.training.prepare(
    model, optimizer, loader, scheduler, grad_scaler=scaler if args.bf16 else None, **cut
)
for epoch in loader.epochs(args.epochs):
    if epoch == 2 and leaves("start"):
        break
    model.train()
    for inputs, targets in loader:
        kill("batch", iteration=8)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if loader.sync_gradients:
            kill("exchange", iteration=11)  # the last of its epoch
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if args.leave == "batch" and loader.sync_gradients and loader.iteration == 8:
            break
    kill("epoch", iteration=11)
    if args.leave == "batch" and loader.iteration == 8:
        break
    score = validate(model)
    scheduler.step(score)
    optimizer.param_groups[0]["weight_decay"] = score / 10  # whoever computed what last, all score the same noise
    print(f"epoch {epoch}: validation {score:.4f}, learning rate {optimizer.param_groups[0]['lr']:.4g}")
    if epoch == 1 and leaves("epoch"):
        break
if loader.is_lowest_rank:
    print(f"saved after {loader.result.iterations} iterations with {sum(1 for _ in model.state_dict())} tensors")
