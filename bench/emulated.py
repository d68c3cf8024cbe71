"""The training that bench/shards.py measures: a worker's compute is a sleep proportional to its samples.

So every worker has an accelerator of its own, as far as time goes, however few cores the machine has.
"""

import argparse
import time

import torch
from rescaled import Noting
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import resile.training
from resile.training import ElasticModel


class Accelerator(nn.Module):
    """A small linear model that takes ``seconds`` for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self._seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self._seconds * len(inputs))
        outputs: Tensor = self.linear(inputs)
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--num-shards", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--sample-seconds", type=float, required=True)
    parser.add_argument("--stamps", required=True)
    args = parser.parse_args()

    resile.training.seed()
    size = args.batch_size * args.iterations
    data = TensorDataset(torch.zeros(size, 8), torch.zeros(size, dtype=torch.long))
    model = Accelerator(args.sample_seconds)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ElasticModel(
        model, lambda: (data, None), nn.functional.cross_entropy, optimizer, callbacks=[Noting(args.stamps)]
    ).train(epochs=1, batch_size=args.batch_size, num_shards=args.num_shards)


if __name__ == "__main__":
    main()
