"""Trains a tiny model on PyTorch's simulated device, and notes on which thread its gradients arrive."""

import argparse
import threading
from pathlib import Path

import torch
import torch_openreg  # noqa: F401  registers the device
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resile.training import ElasticModel, seed
from resile_learner import devices

parser = argparse.ArgumentParser()
parser.add_argument("--notes", type=Path, required=True, help="the file that each gradient's thread and device go to")
args = parser.parse_args()
devices.probe_digest = lambda device: "none"  # the simulated device has no convolutions


def note(parameter: Tensor) -> None:
    thread = "main" if threading.current_thread() is threading.main_thread() else "device"
    with args.notes.open("a") as file:
        file.write(f"{thread} {parameter.grad.device.type if parameter.grad is not None else None}\n")


seed(0)
inputs = torch.randn(96, 16)
dataset = TensorDataset(inputs, inputs[:, :2].clone())
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to("openreg")
next(model.parameters()).register_post_accumulate_grad_hook(note)
ElasticModel(
    model,
    lambda: (dataset, None),
    lambda outputs, targets: (outputs - targets).square().mean(),
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
).train(epochs=3, batch_size=24, num_shards=6, checkpoint_every=4)
