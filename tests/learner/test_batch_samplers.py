"""Batches that a batch sampler draws: the same on every worker, of any length, followed exactly."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

from resile.training import ElasticLoop
from resile_learner.training.data.batch_samplers import sampled_batches
from resile_learner.training.data.batches import Position
from resile_learner.training.data.samplers import order_digest
from resile_shared.errors import UsageError

LENGTHS = (7, 1, 12, 4, 3)


class Own:
    """Yields what ``draw`` returns."""

    def __init__(self, draw: Any, length: int = len(LENGTHS)) -> None:
        self.draw, self.length, self.epoch = draw, length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.draw(self))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def buckets(_: Own) -> list[list[int]]:
    samples = torch.randperm(27)
    batches = [batch.tolist() for batch in samples.split(LENGTHS)]
    random.shuffle(batches)
    return batches


def planned(sampler: Any, num_shards: int | None = None) -> Any:
    return sampled_batches(sampler, num_samples=30, num_shards=num_shards, seed=0, more={})


SAMPLERS = {
    "buckets": lambda: Own(buckets),
    "torch": lambda: BatchSampler(RandomSampler(range(30)), 8, drop_last=False),
    "its own generator": lambda: BatchSampler(RandomSampler(range(30), generator=torch.Generator()), 8, drop_last=True),
    "a list": lambda: [[0, 1], [2], [3, 4, 5]],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_follow_each_other_and_are_the_same_for_a_joiner(name: str) -> None:
    plan, joiner = planned(SAMPLERS[name]()), planned(SAMPLERS[name]())
    position, count = Position(), 0
    while position.epoch < 3:
        assert plan.position(count) == position
        assert plan.num_batches(position, epochs=3) == 3 * plan.per_epoch - count
        batch = joiner.batch(position) if count else plan.batch(position)
        assert batch.indices.tolist() == plan.batch(position).indices.tolist()
        shards = [batch.shard(leaf).tolist() for leaf in range(batch.num_shards)]
        assert [index for shard in shards for index in shard] == batch.indices.tolist()
        assert all(shards)
        position, count = batch.next, count + 1
    assert count == 3 * plan.per_epoch
    assert order_digest(plan) == order_digest(joiner)


def test_short_batches_have_fewer_shards() -> None:
    plan = planned([list(range(length)) for length in (12, 5, 1, 24)], num_shards=12)
    batches = [plan.batch(plan.position(number)) for number in range(4)]
    assert [batch.num_shards for batch in batches] == [6, 2, 1, 12]
    assert planned([[0] * 40]).num_shards == 4


def test_an_epoch_may_be_longer_than_any_limit_if_its_length_is_told() -> None:
    length = (1 << 20) // 8 + 1
    assert planned(Own(lambda _: repeat(range(8), length), length)).per_epoch == length


def test_other_cuts_of_the_same_order_are_noticed() -> None:
    assert order_digest(planned([[0, 1], [2]])) != order_digest(planned([[0], [1, 2]]))


KEPT = torch.Generator()


class Endless:
    """Yields ``batch`` again and again, as samplers for training by iterations do."""

    def __init__(self, batch: Callable[[], Iterable[int]]) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch()


class Counted(Endless):
    """The same, with a length."""

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("sampler", "complaint"),
    [
        (Own(lambda _: torch.randperm(20, generator=KEPT).split(4)), "yields other batches each time"),
        (Own(lambda _: [[0]] * 4), "yields 4 batches in epoch 0 instead of 5"),
        (Own(lambda own: [[0]] * (5 - own.epoch)), "yields 4 batches in epoch 1 instead of 5"),
        (Own(lambda own: [[0]] * (5 + own.epoch)), "yields more than 5 batches in epoch 1 instead of 5"),
        (Own(lambda _: [[0], []] * 2, 4), "yields an empty batch in epoch 0"),
        (Own(lambda _: [[0], [1, 30]], 2), "yields indices from 1 to 30 in epoch 0, and the dataset has 30"),
        ([], "yields 0 batches"),
        (Endless(lambda: [0, 1]), "1048576 indices and more in epoch 0, .*islice, or give it __len__"),
        (Endless(list), "yields an empty batch in epoch 0"),
        (Endless(lambda: repeat(0)), "1048576 indices and more in epoch 0"),
        (Counted(lambda: [0, 1]), "yields more than 3 batches in epoch 0 instead of 3"),
        (Counted(lambda: repeat(0)), "1048576 indices and more in a batch of epoch 0"),
    ],
)
def test_a_batch_sampler_that_workers_cannot_follow_is_refused(sampler: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        planned(sampler).batch(Position(epoch=1))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"sampler": range(30)}, "sampler was given beside a batch sampler"),
        ({"drop_last": True}, "drop_last was given beside a batch sampler"),
        ({"batch_range": (24, 64)}, "batch_range was given beside a batch sampler"),
    ],
)
def test_settings_that_cut_batches_otherwise_are_refused(more: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Context().run(lambda: train(Own(buckets), **more))


def train(batches: Any, **more: Any) -> Any:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(30.0)[:, None])
    loop = ElasticLoop(model, optimizer, data, epochs=2, batch_sampler=batches, **more)
    sizes = []
    for iteration in loop:
        sizes.append(sum(len(x) for (x,) in iteration.shards() if iteration.backward(model(x).square().mean()) is None))
        if iteration.exchange():
            optimizer.step()
    return sizes, loop.run.ledger.epochs()


def test_the_ledger_follows_the_batches_that_were_drawn() -> None:
    sizes, epochs = Context().run(lambda: train(Own(buckets)))
    assert sorted(sizes[:5]) == sorted(sizes[5:]) == sorted(LENGTHS)
    assert [(epoch.samples, epoch.once, epoch.never, epoch.as_drawn) for epoch in epochs] == [(30, 27, 3, True)] * 2
