"""A script for torchrun, as there are many: DistributedDataParallel over gloo, snapshots, nothing of Resile."""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--snapshot", type=Path, required=True)
parser.add_argument("--hold", type=Path, help="a file; after its first epoch, training waits until it is there")
parser.add_argument("--kill", type=Path, help="a file; rank 1 creates it after its first epoch and kills itself")
parser.add_argument("--fail", action="store_true", help="rank 1 raises an error after its first epoch")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
print(
    f"rank {rank} of {dist.get_world_size()}, {local_rank} of {os.environ['LOCAL_WORLD_SIZE']} on its host", flush=True
)

inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=6, sampler=sampler)
torch.manual_seed(0)
model = nn.Linear(4, 2)
first = 0
if options.snapshot.exists():
    snapshot = torch.load(options.snapshot)
    model.load_state_dict(snapshot["model"])
    first = snapshot["epoch"]
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    if rank == 0:
        unfinished = options.snapshot.with_suffix(".part")
        torch.save({"model": model.state_dict(), "epoch": epoch + 1}, unfinished)
        unfinished.rename(options.snapshot)
    dist.barrier()
    print(f"epoch {epoch}", flush=True)
    if rank == 1 and options.kill and not options.kill.exists():
        options.kill.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and options.fail:
        sys.exit("out of luck")
    while options.hold and not options.hold.exists():
        time.sleep(0.05)
dist.destroy_process_group()


def write_last() -> None:
    """Write when the script has come to its end, as what saves in the background does."""
    time.sleep(0.5)
    options.snapshot.with_name(f"last-{rank}").touch()


threading.Thread(target=write_last).start()
