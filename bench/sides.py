"""The trainings that bench/steady.py compares: one worker of Resile, or one rank of DistributedDataParallel.

Both train the same model on the same data with the same optimizer, each as its users would write it. It is also the
script that Resile's workers run.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gate import Turnstile
from models import WORKLOADS, LossFunction
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

LR = 1e-3


def train_with_ddp(workload: str, name: str, *, rank: int, size: int, port: int, gate: str) -> None:
    """Train by DistributedDataParallel on gloo until the gate closes; without a port, each rank for itself."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = WORKLOADS[workload]()
    model = work.model
    if port:
        distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    sampler: DistributedSampler[Any] = DistributedSampler(work.dataset, size, rank)
    loader = DataLoader(work.dataset, batch_size=work.batch_size // size, sampler=sampler, drop_last=True)

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    turnstile = Turnstile(gate, name, rank)
    endless = batches()
    while turnstile.pass_():
        batch = next(endless)
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()


def train_with_resile(
    workload: str, name: str, *, num_shards: int | None, mode: Any, gate: str, measures_noise: bool
) -> None:
    """Train by Resile's loop until the gate closes."""
    from resile.training import ElasticLoop, seed

    seed(0)
    work = WORKLOADS[workload]()
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=LR)
    loop = ElasticLoop(
        work.model,
        optimizer,
        work.dataset,
        epochs=1_000_000,
        batch_size=work.batch_size,
        num_shards=num_shards,
        mode=mode,
        batch_range=(work.batch_size, 8 * work.batch_size) if measures_noise else None,
    )
    turnstile: Turnstile | None = None
    for iteration in loop:
        if turnstile is None:
            turnstile = Turnstile(gate, name, loop.run.session.view.rank)
            _time_exchange(turnstile)
        if not turnstile.pass_():
            return
        for batch in iteration.shards():
            iteration.backward(work.loss(work.model, batch))
        if iteration.exchange():
            optimizer.step()


class WithLoss(nn.Module):
    """A model that returns its loss, as language models do, whose outputs are large."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def train_with_bodies(workload: str, name: str, *, gate: str) -> None:
    """Train by a loop whose body runs once for each batch, until the gate closes."""
    from resile.training import prepare, seed
    from resile.training.extend import current_session

    seed(0)
    work = WORKLOADS[workload]()
    model: Any = WithLoss(work.model, work.loss) if workload == "gpt" else work.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader: Any = DataLoader(work.dataset, batch_size=work.batch_size, shuffle=True)
    model, optimizer, loader = prepare(model, optimizer, loader, body="batch")
    turnstile: Turnstile | None = None
    for _ in loader.epochs(1_000_000):
        for batch in loader:
            if turnstile is None:
                turnstile = Turnstile(gate, name, current_session().view.rank)
                _time_exchange(turnstile)
            if not turnstile.pass_():
                return
            optimizer.zero_grad()
            loss = model(batch) if workload == "gpt" else work.loss(model, batch)
            loss.backward()
            optimizer.step()


def _time_exchange(turnstile: Turnstile) -> None:
    """Note what goes by inside the exchange: in gradient hooks, and at the end when a worker waits for the others."""
    from resile_learner.collectives.round import LinkRound

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                turnstile.note("exchange", time.perf_counter() - begun)

        return wrapper

    LinkRound.push = timed(LinkRound.push)  # type: ignore[method-assign]
    LinkRound.finish = timed(LinkRound.finish)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--gate", required=True)
    parser.add_argument("--num-shards", type=int)
    parser.add_argument("--mode", default="same-bits")
    parser.add_argument("--measures-noise", action="store_true")
    parser.add_argument("--body", choices=("batch", "shard"), default="shard")
    args = parser.parse_args()
    if args.body == "batch":
        train_with_bodies(args.workload, args.name, gate=args.gate)
        return
    train_with_resile(
        args.workload,
        args.name,
        num_shards=args.num_shards,
        mode=args.mode,
        gate=args.gate,
        measures_noise=args.measures_noise,
    )


if __name__ == "__main__":
    main()
