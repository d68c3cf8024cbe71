"""The training that rescale.py, pool.py and recovery.py disturb: an MLP with AdamW that notes its iterations."""

import argparse

import torch
from models import mlp_of
from stamps import StampPad

import resile.training
from resile.training import Callback, ElasticLoop, ElasticModel, Iteration


class Noting(Callback):
    """Notes each iteration, and in which generation it was committed."""

    def __init__(self, path: str) -> None:
        self._pad = StampPad(path)

    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        view = loop.run.session.view
        self._pad.stamp(iteration.number, membership=view.generation, workers=view.size)


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
        callbacks=[Noting(args.stamps)],
    )
    elastic.train(epochs=1_000_000, batch_size=work.batch_size, num_shards=args.num_shards)


if __name__ == "__main__":
    main()
