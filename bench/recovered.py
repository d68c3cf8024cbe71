"""The trainings by torchrun and by torchft that bench/recovery.py disturbs: the model and batch of `rescaled.py`.

Each is written as its users would write it.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from models import mlp_of
from stamps import StampPad
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCH_SIZE = 96
NUM_WORKERS = 4
CHECKPOINT_EVERY = 10
TIMEOUT = timedelta(seconds=1)
START_TIMEOUT = timedelta(seconds=60)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Local batches, for ever."""
    work = mlp_of(1, batch_size=BATCH_SIZE)
    loader: DataLoader[Any] = DataLoader(work.dataset, batch_size=BATCH_SIZE // NUM_WORKERS, shuffle=True)
    while True:
        yield from loader


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp_of(1, batch_size=BATCH_SIZE).model
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_under_torchrun(pad: StampPad, checkpoint: Path) -> None:
    """Train by DistributedDataParallel; the lowest rank writes checkpoints, and all begin with the last one."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    model, optimizer = prepared()
    iteration = 0
    if checkpoint.exists():
        stored = torch.load(checkpoint)
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        iteration = stored["iteration"]
    parallel = DistributedDataParallel(model)
    leads = distributed.get_rank() == 0
    for inputs, targets in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
        if leads:
            pad.stamp(iteration, membership=os.getpid(), workers=distributed.get_world_size())
        iteration += 1
        if leads and iteration % CHECKPOINT_EVERY == 0:
            new = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}, new)
            new.rename(checkpoint)


def train_under_torchft(pad: StampPad, replica: int) -> None:
    """Train as one replica of several."""
    import torchft

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, optimizer = prepared()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(stored: dict[str, Any]) -> None:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=START_TIMEOUT,
        connect_timeout=START_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica-{replica}",
        hostname="127.0.0.1",
    )
    parallel = torchft.DistributedDataParallel(manager, model)
    elastic = torchft.Optimizer(manager, optimizer)
    for inputs, targets in batches():
        before = manager.current_step()
        elastic.zero_grad()
        nn.functional.cross_entropy(parallel(inputs), targets).backward()
        elastic.step()
        if manager.current_step() > before:
            step, quorum = manager.current_step(), manager._quorum_id
            pad.stamp(step, membership=quorum, workers=manager.num_participants())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", choices=["torchrun", "torchft"], required=True)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--replica", type=int)
    args = parser.parse_args()
    pad = StampPad(args.stamps)
    train: Callable[[], None] = {
        "torchrun": lambda: train_under_torchrun(pad, args.checkpoint),
        "torchft": lambda: train_under_torchft(pad, args.replica),
    }[args.by]
    train()


if __name__ == "__main__":
    main()
