"""The training that rescale.py, pool.py and recovery.py disturb: an MLP with AdamW that notes its iterations."""

import argparse

import torch
from models import Workload, mlp_of
from stamps import StampPad
from torch.nn import functional as F
from torch.utils.data import DataLoader

import resile.training
from resile.training import Callback, ElasticLoop, ElasticModel, Iteration
from resile_learner.session import current_session

EPOCHS = 1_000_000


class Noting(Callback):
    """Notes each iteration, and in which generation it was committed."""

    def __init__(self, path: str) -> None:
        self._pad = StampPad(path)

    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        view = loop.run.session.view
        self._pad.stamp(iteration.number, membership=view.generation, workers=view.size)


def train_by_shards(work: Workload, optimizer: torch.optim.Optimizer, num_shards: int, stamps: str) -> None:
    """Train with a body for each shard."""
    elastic = ElasticModel(
        work.model,
        lambda: (work.dataset, None),
        F.cross_entropy,
        optimizer,
        callbacks=[Noting(stamps)],
    )
    elastic.train(epochs=EPOCHS, batch_size=work.batch_size, num_shards=num_shards)


def train_by_batches(work: Workload, optimizer: torch.optim.Optimizer, num_shards: int, stamps: str) -> None:
    """Train with a body for each batch, at whose beginning the iteration before it is committed."""
    pad = StampPad(stamps)
    data = DataLoader(work.dataset, batch_size=work.batch_size, shuffle=True)
    model, optimizer, loader = resile.training.prepare(work.model, optimizer, data, num_shards=num_shards)
    for _epoch in loader.epochs(EPOCHS):
        for inputs, targets in loader:
            view = current_session().view
            if view.rank == 0 and loader.iteration > 0:
                pad.stamp(loader.iteration - 1, membership=view.generation, workers=view.size)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--num-shards", type=int, required=True)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--body", choices=["shard", "batch"], default="shard")
    args = parser.parse_args()

    resile.training.seed()
    work = mlp_of(args.millions, batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    train = {"shard": train_by_shards, "batch": train_by_batches}[args.body]
    train(work, optimizer, args.num_shards, args.stamps)


if __name__ == "__main__":
    main()
