"""What a check trains: one of several models, and what happens to a worker in the middle of a backward pass."""

import argparse
import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resile.training import Callback, ElasticModel, seed

parser = argparse.ArgumentParser()
parser.add_argument("--case", choices=["attention", "batchnorm", "overflow", "compile", "readers"], default="attention")
parser.add_argument("--device", default="cuda")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--notes", type=Path, help="a folder: what each worker notes about itself")
parser.add_argument("--strike", choices=["kill", "freeze", "oom"])
args = parser.parse_args()

ON_GPU = args.device == "cuda"
STRIKE_AT = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), -1, 32)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


def build() -> nn.Module:
    if args.case in ("attention", "overflow"):
        return Attention()
    if args.case == "batchnorm":
        front = [nn.Unflatten(1, (4, 16, 16)), nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        return nn.Sequential(*front, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 2))
    return nn.Sequential(nn.Linear(1024, 128), nn.GELU(), nn.Linear(128, 2))


class Notes(Callback):
    """Writes the device and the memory of this worker down, and draws the strike."""

    iteration = 0

    def on_iteration(self, loop: Any, iteration: Any) -> None:
        Notes.iteration = iteration.number
        if args.notes:
            unit = str(torch.cuda.get_device_properties(0).uuid) if ON_GPU else "cpu"
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            memory = torch.cuda.memory_reserved() if ON_GPU else resident
            with (args.notes / f"worker-{os.getpid()}").open("a") as file:
                file.write(f"{iteration.number} {unit} {memory}\n")


def strike(gradient: Tensor) -> None:
    """In a backward pass, once: the first worker that makes the file is struck."""
    if Notes.iteration < STRIKE_AT:
        return
    try:
        (args.notes / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    if args.strike == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory (drawn by the checklist)")
    os.kill(os.getpid(), signal.SIGKILL if args.strike == "kill" else signal.SIGSTOP)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(outputs, targets)
    return 1e4 * loss if args.case == "overflow" else loss


seed(0)
inputs = torch.randn(480, 1024)
dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
model = build().to(args.device)
if args.case == "batchnorm":
    model = model.to(memory_format=torch.channels_last)
if args.strike:
    next(iter(model.parameters())).register_hook(strike)
compiled = torch.compile(model, backend="inductor" if ON_GPU else "aot_eager")
trained = compiled if args.case == "compile" else model
overflowing = 2.0**24 if ON_GPU else 2.0**127  # float16, or float32
scaler = torch.amp.GradScaler(args.device, init_scale=overflowing, growth_interval=5)
ElasticModel(
    trained,
    lambda: (dataset, None),
    loss_fn,
    torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    autocast=torch.float16 if args.case == "overflow" and ON_GPU else None,
    grad_scaler=scaler if args.case == "overflow" else None,
    num_workers=2 if args.case == "readers" else 0,
    callbacks=[Notes()],
).train(epochs=args.epochs, batch_size=48, num_shards=24, checkpoint_every=1000)
