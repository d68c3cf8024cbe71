"""What a sampler draws depends on the seed and the epoch alone, and every worker draws it."""

import random
from collections.abc import Iterator
from contextvars import Context
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from resile.training import ElasticLoop
from resile_learner.training.data.samplers import SamplerOrder, order_digest, planned
from resile_shared.errors import UsageError


class Own:
    """A sampler of a script: its length, and how it draws."""

    def __init__(self, length: int, draw: Any) -> None:
        self.length = length
        self.draw = draw
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0, 4.0] * 5, num_samples=30),
    "its own generator": lambda: WeightedRandomSampler([1.0] * 20, 30, generator=torch.Generator()),
    "with replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=30),
    "subset": lambda: SubsetRandomSampler(range(0, 20, 2)),
    "numpy": lambda: Own(20, lambda _: np.random.permutation(20)),
    "python": lambda: Own(20, lambda _: random.sample(range(20), 20)),
    "set_epoch": lambda: Own(20, lambda own: np.random.RandomState(own.epoch).permutation(20)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_epoch_is_the_same_for_a_worker_that_saw_no_earlier_one(name: str) -> None:
    first = SamplerOrder(SAMPLERS[name](), num_samples=20, seed=0)
    epochs = [first(epoch).tolist() for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    torch.rand(5)
    joiner = SamplerOrder(SAMPLERS[name](), num_samples=20, seed=0)
    assert joiner(3).tolist() == epochs[3]
    assert first(1).tolist() == epochs[1], "an epoch that is no longer kept"


def test_drawing_leaves_the_scripts_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    SamplerOrder(SAMPLERS["weighted"](), num_samples=20, seed=0)(1)
    assert torch.equal(torch.rand(1), expected)


KEPT = torch.Generator()


@pytest.mark.parametrize(
    ("sampler", "complaint"),
    [
        (Own(20, lambda _: torch.randperm(20, generator=KEPT).tolist()), "yields other indices each time"),
        (Own(20, lambda _: range(19)), "yields 19 indices in epoch 0, and its length is 20"),
        (Own(20, lambda _: repeat(0)), "yields more than 20 indices in epoch 0, and its length is 20"),
        (Own(2, lambda _: [0, 20]), "yields indices from 0 to 20 in epoch 0, and the dataset has 20 samples"),
        (Own(1, lambda _: [-1]), "yields indices from -1"),
        (iter([1, 2]), "has no length"),
        (
            RandomSampler(range(20), replacement=True, num_samples=int(1e10)),
            r"draws 10,000,000,000 samples in an epoch",
        ),
    ],
)
def test_a_sampler_that_workers_would_not_agree_on_is_refused(sampler: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        SamplerOrder(sampler, num_samples=20, seed=0)


def test_workers_compare_what_they_draw() -> None:
    def digest(weights: list[float]) -> str | None:
        sampler = WeightedRandomSampler(weights, 30)
        return order_digest(planned(20, 10, 2, seed=0, shuffle=False, drop_last=False, sampler=sampler))

    assert digest([1.0] * 20) == digest([1.0] * 20)
    assert digest([1.0] * 20) != digest([1.0, 9.0] * 10)


def test_the_ledger_counts_what_was_drawn() -> None:
    sampler = Own(6, lambda _: [0, 0, 1, 2, 3, 3])

    def run() -> Any:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.ones(5, 1))
        loop = ElasticLoop(model, optimizer, data, batch_size=3, num_shards=1, sampler=sampler)
        for iteration in loop:
            for (inputs,) in iteration.shards():
                iteration.backward(model(inputs).square().mean())
            if iteration.exchange():
                optimizer.step()
        return loop.result, loop.run.ledger.epochs()

    result, (epoch,) = Context().run(run)
    assert result.iterations == 2
    assert result.samples_seen == 6
    assert (epoch.samples, epoch.once, epoch.more, epoch.never, epoch.as_drawn) == (5, 2, 2, 1, True)
