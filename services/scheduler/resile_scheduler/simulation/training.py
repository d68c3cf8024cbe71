"""What simulated jobs train, and how fast."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

WorkersByHost = tuple[int, ...]
"""How many workers of a job there are on each of its hosts, in rising order."""


class Pace(NamedTuple):
    """How a job trains with its workers and its batch."""

    seconds: float
    """Of an iteration."""
    work: float
    """That an iteration does."""
    until: float
    """So much work is done when the pace changes, or the job is complete."""


class Training(Protocol):
    """What a job trains: ``work`` in all, in a unit of its own, of which an iteration does some.

    The other properties are what its workers report at their training call.
    """

    @property
    def work(self) -> float:
        """All that has to be done."""
        ...

    @property
    def iterations_total(self) -> int:
        """At the batch size that it begins with."""
        ...

    @property
    def num_shards(self) -> int:
        """The most workers that can take part."""
        ...

    @property
    def batch_size(self) -> int:
        """The global batch that it begins with, in samples."""
        ...

    def pace(self, workers: WorkersByHost, batch_size: int, done: float) -> Pace:
        """Return the pace once ``done`` work is done."""
        ...


@dataclass(frozen=True)
class Sharded:
    """Iterations that take ``shard_seconds`` for each shard of the worker that has most; an exchange takes no time."""

    iterations_total: int
    num_shards: int = 24
    shard_seconds: float = 0.01

    @property
    def work(self) -> float:
        """In iterations."""
        return self.iterations_total

    @property
    def batch_size(self) -> int:
        """Eight samples in each shard."""
        return self.num_shards * 8

    def pace(self, workers: WorkersByHost, batch_size: int, done: float) -> Pace:
        """Return the same pace for any batch."""
        return Pace(-(-self.num_shards // sum(workers)) * self.shard_seconds, 1.0, self.work)
