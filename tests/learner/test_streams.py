"""Streams: every worker reads the same samples in the same order, wherever it begins, and keeps its own shards."""

import random
from collections.abc import Iterator
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from resile.training import ElasticLoop, prepare, seed
from resile_learner.session import View
from resile_learner.training.data.batches import BatchPlan, Position
from resile_learner.training.data.stream_shards import StreamShards
from resile_shared.errors import UsageError

SIZE = 43


class Plain(IterableDataset[float]):
    """Shuffled by a buffer, with the generator of python; each sample has noise from that of torch."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.num_read = 0

    def __iter__(self) -> Iterator[float]:
        buffer = []
        for number in range(self.size):
            buffer.append(number)
            if len(buffer) == 8:
                yield self.noisy(buffer.pop(random.randrange(8)))
        random.shuffle(buffer)
        for number in buffer:
            yield self.noisy(number)

    def noisy(self, number: int) -> float:
        self.num_read += 1
        return number + torch.rand(()).item()


class Stateful(Plain):
    """Knows by itself where it is. ``resumed`` is what the next iterator begins with, as in torchdata's examples."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.next, self.resumed, self.epoch = 0, 0, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        first, self.resumed = self.resumed, 0
        for number in range(first, self.size):
            self.next = number + 1
            yield self.noisy((number * (7 + self.epoch)) % self.size)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = self.next = state["next"]


class StatefulIterator(Plain):
    """Its iterator knows where it is."""

    def __iter__(self) -> Iterator[float]:
        return Numbers(self)


class Numbers:
    def __init__(self, stream: Plain) -> None:
        self.stream, self.next = stream, 0

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        if self.next == self.stream.size:
            raise StopIteration
        self.next += 1
        return self.stream.noisy(self.next)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Continued(Plain):
    """Its next iterator goes on where the last one was left: it begins anew at the end of an epoch alone."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.next = 0

    def __iter__(self) -> Iterator[float]:
        while self.next < self.size:
            self.next += 1
            yield self.noisy(self.next)
        self.next = 0


class StatefulContinued(Continued):
    """The same, with its counter as state."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class OwnRandom(Plain):
    """Shuffled by a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.random = random.Random(5)

    def __iter__(self) -> Iterator[float]:
        yield from map(self.noisy, self.random.sample(range(self.size), self.size))


class OwnEpoch(Plain):
    """Counts its epochs by itself, where one ends."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.epoch = 0

    def __iter__(self) -> Iterator[float]:
        yield from (self.noisy(self.epoch * 1000 + number) for number in range(self.size))
        self.epoch += 1


class Window(Plain):
    """Each epoch is the next part of one long sequence; its state is where it is in this."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.next = 0

    def __iter__(self) -> Iterator[float]:
        while True:
            self.next += 1
            yield self.noisy(self.next - 1)
            if self.next % self.size == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class StatefulEpochs(OwnEpoch):
    """Knows by itself where it is, and in which epoch."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.next, self.resumed = 0, 0

    def __iter__(self) -> Iterator[float]:
        first, self.resumed = self.resumed, 0
        for number in range(first, self.size):
            self.next = number + 1
            yield self.noisy(self.epoch * 1000 + number)
        if first < self.size:
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = self.next = state["next"]
        self.epoch = state["epoch"]


class Forgetful(Stateful):
    """Its state leaves out what its samples depend on."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.num_drawn = 0

    def noisy(self, number: int) -> float:
        self.num_drawn += 1
        return super().noisy(self.num_drawn)


KINDS = [Plain, Stateful, StatefulIterator]


class Reading:
    """One worker's reading of a stream."""

    def __init__(
        self,
        stream: Any,
        batch_size: int = 10,
        num_shards: int | None = 4,
        *,
        is_fast: bool = False,
        collate_fn: Any = list,
    ) -> None:
        self.stream = stream
        self.position = Position()
        self.shards = StreamShards(
            stream,
            batch_size=batch_size,
            num_shards=num_shards,
            seed=1,
            collate_fn=collate_fn,
            position=lambda: self.position,
            is_fast=is_fast,
        )

    def batch(self, rank: int = 0, size: int = 1, generation: int = 1) -> Any:
        """What this worker computes of the batch at its position."""
        view = View(generation, tuple(range(size)), rank)
        batch = self.shards.batch(self.position, view)
        held = range(*batch.held_by(rank, size))
        return batch, {leaf: self.shards.next_shard(self.position, 0, view) for leaf in held}

    def commit(self, batch: Any) -> None:
        self.position = batch.next


def whole(stream: Any, epochs: int = 3, batch_size: int = 10) -> list[tuple[Position, list[float]]]:
    """All batches, as a single worker has them."""
    reading, result = Reading(stream, batch_size, num_shards=min(4, batch_size)), []
    while reading.position.epoch < epochs:
        batch, shards = reading.batch()
        result.append((reading.position, [value for shard in shards.values() for value in shard.batch]))
        reading.commit(batch)
    return result


@pytest.mark.parametrize("size", [1, 2, 9, 10, 11, 12, 40, 41])
@pytest.mark.parametrize("batch_size", [1, 2, 10])
def test_a_stream_is_cut_as_a_dataset_is(size: int, batch_size: int) -> None:
    plan = BatchPlan(size, batch_size, min(4, batch_size), seed=0, shuffle=False)
    expected = [plan.batch(plan.position(number)) for number in range(2 * plan.per_epoch)]
    found = whole(Plain(size), 2, batch_size)
    assert [(position, len(values)) for position, values in found] == [
        (plan.position(number), len(batch.indices)) for number, batch in enumerate(expected)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_worker_has_its_shards_wherever_it_begins_to_read(kind: Any) -> None:
    expected = whole(kind())
    epochs = [
        sorted(int(value) for position, values in expected if position.epoch == e for value in values) for e in (0, 1)
    ]
    assert epochs[0] == epochs[1]
    assert len(set(epochs[0])) == SIZE
    assert expected[0][1] != expected[5][1], "each epoch has its own random numbers"
    for begun in range(len(expected)):
        donor = Reading(kind())
        for _ in range(begun):
            donor.commit(donor.batch()[0])
        joiner = Reading(kind())
        joiner.shards.load_state_dict(donor.shards.state_dict())
        joiner.position = donor.position
        donor.shards.restart()
        for position, values in expected[begun : begun + 3]:
            (batch, ours), (_, theirs) = donor.batch(0, 2, 2), joiner.batch(1, 2, 2)
            assert batch.epoch == position.epoch
            assert [value for shard in (*ours.values(), *theirs.values()) for value in shard.batch] == values
            donor.commit(batch)
            joiner.commit(batch)


@pytest.mark.parametrize("kind", [*KINDS, Continued, StatefulContinued])
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_batch_has_the_same_samples_after_a_loss(kind: Any, is_behind: bool) -> None:
    expected = whole(kind())
    reading, donor = Reading(kind()), Reading(kind())
    for position, values in expected:
        assert reading.position == position
        reading.batch(1, 3)
        reading.shards.restart()  # the members of a newer generation repeat it
        if is_behind:
            reading.shards.load_state_dict(donor.shards.state_dict())
        batch, shards = reading.batch(0, 1, 2)
        assert [value for shard in shards.values() for value in shard.batch] == values
        reading.commit(batch)
        donor.commit(donor.batch()[0])
    assert reading.stream.num_read == 3 * SIZE, "each sample was read once"


def test_a_worker_that_lacks_an_iteration_goes_on_reading() -> None:
    donor, behind = Reading(Continued()), Reading(Continued())
    for position, values in whole(Continued()):
        behind.position = donor.position  # the state of the others is loaded, who have committed the iteration before
        behind.shards.load_state_dict(donor.shards.state_dict())
        donor.commit(donor.batch()[0])
        assert behind.position == position
        assert [value for shard in behind.batch()[1].values() for value in shard.batch] == values


def test_what_a_body_does_to_its_shard_does_not_change_the_samples() -> None:
    reading = Reading(Rows(torch.zeros(30, 2)))
    for generation in (1, 2):
        for shard in reading.batch(0, 1, generation)[1].values():
            for (row,) in shard.batch:
                assert not row.any()
                row += 1


def test_a_stream_that_does_not_begin_anew_is_named_after_a_resumption() -> None:
    donor = Reading(Continued())
    for _ in range(2):
        donor.commit(donor.batch()[0])
    resumed = Reading(Continued())
    resumed.shards.load_state_dict(donor.shards.state_dict())
    resumed.position = donor.position
    next(iter(resumed.stream))  # the script looks at a sample
    with pytest.raises(UsageError, match=r"\(Continued\) begins epoch 0 with another sample than before: let __iter__"):
        resumed.batch()


def resumed(kind: Any, begun: int) -> tuple[Reading, list[tuple[Position, list[float]]]]:
    """A worker that resumes after ``begun`` batches, and the batches of a run that was not disturbed."""
    donor = Reading(kind())
    for _ in range(begun):
        donor.commit(donor.batch()[0])
    reading = Reading(kind())
    reading.shards.load_state_dict(donor.shards.state_dict())
    reading.position = donor.position
    return reading, whole(kind())


@pytest.mark.parametrize("kind", [*KINDS, Continued, StatefulContinued, Window, StatefulEpochs])
def test_a_resumed_run_has_the_samples_of_one_that_was_not_disturbed(kind: Any) -> None:
    for begun in range(12):
        reading, expected = resumed(kind, begun)
        for position, values in expected[begun:]:
            assert reading.position == position
            batch, shards = reading.batch()
            assert [value for shard in shards.values() for value in shard.batch] == values
            reading.commit(batch)


@pytest.mark.parametrize("kind", [OwnRandom, OwnEpoch])
def test_a_stream_that_carries_something_to_the_next_epoch_without_a_state_goes_on_or_is_named(kind: Any) -> None:
    per_epoch = 5
    for begun in range(per_epoch + 1):  # what it carries follows from reading the first epoch
        reading, expected = resumed(kind, begun)
        assert [value for shard in reading.batch()[1].values() for value in shard.batch] == expected[begun][1]
    for begun in range(per_epoch + 1, 3 * per_epoch):
        reading, _ = resumed(kind, begun)
        with pytest.raises(UsageError, match=r"begins epoch [12] with another.*by set_epoch alone"):
            reading.batch()


@pytest.mark.parametrize("begun", [1, 2, 3])
def test_a_state_that_leaves_something_out_is_named(begun: int) -> None:
    reading, _ = resumed(Forgetful, begun)
    with pytest.raises(UsageError, match=r"\(Forgetful\) continues epoch 0 with another sample.*state_dict with all"):
        reading.batch()


def test_a_stateful_stream_is_not_read_from_the_start() -> None:
    donor = Reading(Stateful())
    for _ in range(3):
        donor.commit(donor.batch()[0])
    joiner = Reading(Stateful())
    joiner.shards.load_state_dict(donor.shards.state_dict())
    joiner.position = donor.position
    joiner.batch()
    assert joiner.stream.num_read == 12


def test_a_worker_that_takes_over_another_state_reads_from_there() -> None:
    expected = whole(Plain())
    donor, other = Reading(Plain()), Reading(Plain())
    other.batch()
    for _ in range(3):
        donor.commit(donor.batch()[0])
    other.shards.load_state_dict(donor.shards.state_dict())
    other.position = donor.position
    assert other.shards.plan.num_samples == donor.shards.plan.num_samples == 32
    _, shards = other.batch()
    assert [value for shard in shards.values() for value in shard.batch] == expected[3][1]


def test_the_state_of_an_iteration_under_way_is_that_of_its_batch() -> None:
    donor, joiner = Reading(Stateful()), Reading(Stateful())
    for _ in range(4):
        donor.commit(donor.batch()[0])
    donor.batch()
    joiner.shards.load_state_dict(donor.shards.state_dict())
    joiner.position = donor.position
    assert joiner.batch()[1][0].batch == donor.batch()[1][0].batch
    assert joiner.stream.num_read == SIZE - 40


class OfKnownLength(Plain):
    def __len__(self) -> int:
        return self.size


def test_the_length_of_an_epoch_is_estimated_until_it_has_ended() -> None:
    assert Reading(OfKnownLength()).shards.plan.num_samples == SIZE
    reading = Reading(Plain(6), 5, num_shards=None)
    assert reading.shards.plan.num_samples == 5
    with pytest.raises(UsageError, match="the length of a stream is not known"):
        reading.shards.plan.batch(Position())
    reading.batch()
    assert reading.shards.plan.num_samples == 6
    assert Reading(Plain(), 64, num_shards=None).shards.plan.num_shards == 8


def test_in_fast_mode_each_worker_has_a_shard_as_far_as_there_are_samples() -> None:
    reading, sizes = Reading(Plain(13), is_fast=True), []
    for _ in range(2):
        batch, shards = reading.batch(1, 5)
        sizes.append((batch.num_shards, [len(shard.batch) for shard in shards.values()]))
        reading.commit(batch)
    assert sizes == [(5, [2]), (3, [1])]


def test_reading_leaves_the_scripts_random_numbers_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    reading = Reading(Plain())
    reading.shards.batch(Position(), View(1, (0,), 0))
    assert (torch.rand(1), random.random()) == expected


def test_what_collate_fn_draws_depends_on_the_epoch_and_the_shard_alone() -> None:
    def drawn(workers: int) -> list[float]:
        readings = [
            Reading(Rows(torch.ones(20, 1)), collate_fn=lambda _: torch.rand(()).item()) for _ in range(workers)
        ]
        found = []
        while readings[0].position.epoch < 2:
            for rank, reading in enumerate(readings):
                batch, shards = reading.batch(rank, workers)
                found += [shard.batch for shard in shards.values()]
                reading.commit(batch)
        return found

    alone_, shared = drawn(1), drawn(2)
    assert alone_ == shared
    assert len(set(alone_)) == 16, "other numbers for each shard of each epoch"


class Item:
    """Counts its instances that are in use."""

    living = 0

    def __init__(self) -> None:
        Item.living += 1

    def __del__(self) -> None:
        Item.living -= 1


class Items(IterableDataset[Item]):
    most = 0

    def __iter__(self) -> Iterator[Item]:
        for _ in range(40):
            item = Item()
            self.most = max(self.most, Item.living)
            yield item


def test_no_more_samples_are_kept_than_those_of_a_batch_and_two_more() -> None:
    reading = Reading(Items(), collate_fn=len)
    for _ in range(4):
        reading.commit(reading.shards.batch(reading.position, View(1, (0,), 0)))
    assert reading.stream.most == 12


def alone(call: Any) -> Any:
    return Context().run(call)


def train(dataset: Any, **more: Any) -> Any:
    seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loop = ElasticLoop(model, optimizer, dataset, epochs=2, batch_size=10, num_shards=3, **more)
    totals = []
    for iteration in loop:
        for (x,) in iteration.shards():
            iteration.backward(model(x).square().mean())
        if iteration.exchange():
            optimizer.step()
        totals.append((loop.iteration, loop.iterations_total, iteration.ends_epoch))
    return loop.result, loop.run.ledger.epochs(), totals


class Rows(IterableDataset[Any]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            yield (row,)


def test_a_stream_has_the_bits_of_the_dataset_in_its_order() -> None:
    rows = torch.randn(SIZE, 2, generator=torch.Generator().manual_seed(0))
    result, epochs, totals = alone(lambda: train(Rows(rows)))
    of_dataset = alone(lambda: train(TensorDataset(rows), shuffle=False))
    assert result == of_dataset[0]
    assert [(epoch.samples, epoch.once) for epoch in epochs] == [(SIZE, SIZE)] * 2
    assert [each[2] for each in totals] == [each[2] for each in of_dataset[2]]
    assert [each[1] for each in totals] == [4, 6, 8, 10, 10, 10, 10, 10, 10, 10], "known once an epoch has ended"


class Emptied(Rows):
    """Its second epoch has nothing left."""

    def __iter__(self) -> Iterator[Any]:
        rows, self.rows = self.rows, self.rows[:0]
        yield from ((row,) for row in rows)


@pytest.mark.parametrize(
    ("dataset", "more", "complaint"),
    [
        (Plain(), {"sampler": [1]}, "sampler was given with a dataset that is a stream"),
        (Plain(), {"batch_sampler": [[1]]}, "batch_sampler was given with a dataset that is a stream"),
        (Plain(), {"batch_range": (3, 20)}, "batch_range was given with a dataset that is a stream"),
        (Plain(), {"drop_last": True}, "drop_last was given with a dataset that is a stream"),
        (Plain(), {"num_workers": 2}, "num_workers was given with a dataset that is a stream.*do in collate_fn"),
        (iter(range(20)), {}, "is an iterator, which can be read once"),
        (Plain(0), {}, "has no samples in epoch 0"),
        (Emptied(torch.ones(12, 2)), {}, "has no samples in epoch 1"),
    ],
)
def test_what_a_stream_cannot_have_is_refused(dataset: Any, more: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        alone(lambda: train(dataset, **more))


def test_a_stream_that_ends_earlier_than_elsewhere_is_named() -> None:
    reading = Reading(Plain(12))
    reading.position = Position(0, 30)
    with pytest.raises(UsageError, match="ended after 12 samples of epoch 0, where it had more than 30"):
        reading.batch()


def test_workers_that_read_other_samples_have_other_facts() -> None:
    facts = set()
    for rows in (torch.ones(30, 2), torch.zeros(30, 2), torch.ones(11, 2), torch.ones(10, 2)):
        reading = Reading(Rows(rows))
        reading.batch()
        facts.add(reading.shards.facts_of_batch()["stream"])
    assert len(facts) == 4, "content, and the end of the epoch, differ"


def test_an_ordinary_loop_reads_a_stream() -> None:
    def run() -> tuple[int, list[int]]:
        seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        _, _, loader = prepare(model, optimizer, DataLoader(Rows(torch.ones(50, 2)), batch_size=5), accumulate=2)
        ends = []
        for _ in loader.epochs(2):
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
            ends.append(loader.iteration)
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        return loader.result.samples_seen, ends

    assert alone(run) == (100, [4, 9])
