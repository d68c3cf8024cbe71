"""The training that bench/shards.py measures: each worker has an emulated accelerator, which takes its time for itself.

An accelerator executes what is queued one after the other, and its worker waits, without a processor, for a gradient
before it is exchanged. So many of them share few cores, and only what the workers do beside them needs a processor.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import resile.training
from resile.training import ElasticLoop

NUM_LAYERS = 8


class Accelerator:
    """A queue of work that takes time, and no processor."""

    def __init__(self) -> None:
        self._is_free_at = 0.0

    def enqueue(self, seconds: float) -> None:
        """Add work behind what is queued; returns at once."""
        self._is_free_at = max(time.monotonic(), self._is_free_at) + seconds

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        time.sleep(max(0.0, self._is_free_at - time.monotonic()))


class _Work(torch.autograd.Function):
    """Work whose gradient, always the same, takes twice as long, as that of a matrix product does."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, layer: "Layer") -> Tensor:
        layer.device.enqueue(layer.seconds / 3)
        ctx.layer = layer
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        layer: Layer = ctx.layer
        layer.device.enqueue(layer.seconds * 2 / 3)
        layer.device.synchronize()
        return gradients[0], layer.gradient, None


class Layer(nn.Module):
    """So many parameters; for a shard it takes ``seconds`` of ``device``."""

    def __init__(self, num_parameters: int, device: Accelerator, *, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_parameters))
        self.gradient = torch.ones(num_parameters)
        self.device = device
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _Work.apply(inputs, self.weight, self)
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-shards", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--shard-seconds", type=float, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="folder for what each worker notes")
    args = parser.parse_args()

    resile.training.seed()
    data = TensorDataset(torch.zeros(args.num_shards * args.iterations, 8))
    device = Accelerator()
    size, seconds = args.parameters // NUM_LAYERS, args.shard_seconds / NUM_LAYERS
    model = nn.Sequential(*(Layer(size, device, seconds=seconds) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = ElasticLoop(model, optimizer, data, batch_size=args.num_shards, num_shards=args.num_shards)
    with (args.notes / str(os.getpid())).open("w", buffering=1) as notes:
        for iteration in loop:
            for (inputs,) in iteration.shards():
                iteration.backward(model(inputs).mean())
            computed = time.monotonic()
            if iteration.exchange():
                notes.write(f"{iteration.number} {computed} {time.monotonic()} {time.process_time()}\n")
                optimizer.step()


if __name__ == "__main__":
    main()
