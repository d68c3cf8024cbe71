"""The training that bench/rescale.py disturbs: an MLP with AdamW that notes when each iteration was committed."""

import argparse
import time

import torch
from models import mlp_of

import resile.training
from resile.training import Callback, ElasticLoop, ElasticModel, Iteration


class Stamps(Callback):
    """Appends "iteration, monotonic time" to a file; the clock is that of the bench."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process

    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        self._file.write(f"{iteration.number} {time.monotonic()}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--num-shards", type=int, required=True)
    parser.add_argument("--stamps", required=True)
    args = parser.parse_args()

    resile.training.seed()
    work = mlp_of(args.millions, batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    elastic = ElasticModel(
        work.model,
        lambda: (work.dataset, None),
        torch.nn.functional.cross_entropy,
        optimizer,
        callbacks=[Stamps(args.stamps)],
    )
    elastic.train(epochs=1_000_000, batch_size=work.batch_size, num_shards=args.num_shards)


if __name__ == "__main__":
    main()
