"""What a policy sees of a job, and what it returns for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # `resile run` does not load numpy
    from .throughput import Throughput


@dataclass(frozen=True)
class BatchRange:
    """The global batches with which a job may train, in samples."""

    least: int
    most: int
    least_per_slot: int = 1
    """The fewest samples of a batch that one worker takes."""


class Room(NamedTuple):
    """Slots that the same jobs may use; ``name`` is unique among those of a decision."""

    name: str
    num_slots: int


@dataclass(frozen=True)
class Demand:
    """What a job can use.

    ``most`` is the smallest of its maximum, its number of shards and the slots that it may run on at all; ``number``
    rises with the submissions.
    """

    job: str
    number: int
    priority: int
    least: int
    most: int
    num_shards: int | None = None
    holds_slots: bool = False
    assigned_workers: int = 0
    """How many workers it was assigned by the decision before; 0 if it holds no slots.

    It may have fewer for a while, as it avoids a host. Policies for which a change has a cost then still choose the
    same, as what they compare with is what they chose.
    """
    is_preemptible: bool = True
    """Whether it may be preempted; if not, its minimum is served before that of any job that may be."""
    keeps_all: bool = False
    """Whether it is not preemptible because preemption is off: its minimum is what it has."""
    iteration: int = 0
    """The next iteration, as far as is known."""
    batch_size: int = 0
    iterations_total: int | None = None
    """How many iterations it has in all; None: not known before its script has reached the training call."""
    has_fixed_length: bool = True
    """Whether ``iterations_total`` is exact; if not, it is an estimate, which may be far too low."""
    active_workers: int = 0
    """Members of the generation that trains; 0 while none does."""
    active_since: int = 0
    """The first iteration of the generation that trains."""
    active_until: int | None = None
    """The iteration at which the generation that trains waits for the next one; None: it does not wait."""
    sizes: tuple[int, ...] | None = None
    """The numbers of workers that are allowed, in rising order; None: any."""
    batch: BatchRange | None = None
    """The range of its batch; None: the batch is ``batch_size``, whatever the number of workers."""
    throughput: "Throughput | None" = None
    """Its fitted throughput; None: nothing is measured yet."""
    most_measured: int = 0
    """The most workers with which iterations were measured."""
    slots_per_host: int | None = None
    """More workers than this train across hosts; None: not known, so all count as on one host."""
    is_scattered: bool = False
    """Whether the workers that it has train across hosts, however few they are."""
    noise_scale: float | None = None
    """Noise scale of the gradient, in samples: its variance per sample over its squared norm. None: not measured."""
    attained: float = 0.0
    """Slot-seconds that it has held so far."""
    deadline_seconds: float | None = None
    """Seconds until the time by which the job should be complete; None: it has no deadline."""
    change_seconds: float = 0.0
    """Seconds of training that it loses when its workers change."""
    rooms: tuple[Room, ...] | None = None
    """The rooms in which it may have slots, sorted; None: it may have any slot."""
    tenant: str = "default"
    holding_since: float = inf
    """Since when it has held slots without a break, or was due before; inf: it holds none. Seconds since the epoch."""
    was_due: bool = False
    """Whether it was due when it got the slots that it holds."""
    due_since: float = inf
    """When it became due, so that its minimum precedes those of jobs that got slots since; inf: it is not due."""

    def is_across(self, workers: int) -> bool:
        """Whether this many workers train across hosts. Any number but the present one is taken to be packed."""
        if self.is_scattered and workers == self.assigned_workers:
            return True
        return self.slots_per_host is not None and workers > self.slots_per_host


@dataclass(frozen=True)
class Target:
    """How many workers a job should have, and why.

    ``is_exact``: no other number will do, so it waits until it can have them all at once.
    """

    workers: int
    reason: str
    batch_size: int | None = None
    """The global batch, in samples; None: it stays as it is."""
    is_exact: bool = False
    not_before: int = 0
    """The first iteration that the workers may train."""
    until: int | None = None
    """The iteration at which the workers wait for the next generation."""
    error: str = ""
    """Why the job fails: it can never have what its user gave it; empty: it does not fail."""

    def is_like(self, other: "Target | None") -> bool:
        """Whether it differs from ``other`` in its reason at most."""
        return other is not None and _without_reason(self) == _without_reason(other)


_without_reason = attrgetter(*(field.name for field in fields(Target) if field.name != "reason"))


Policy = Callable[[Sequence[Demand], int], dict[str, Target]]
Key = Callable[[Demand], tuple[float, ...]]
Ranking = Callable[[Sequence[Demand]], Key]


@dataclass(frozen=True)
class RankedPolicy:
    """A policy, and the ``ranking`` of jobs by which it serves their minimums."""

    decide: Policy
    ranking: Ranking

    def __call__(self, demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        """Return the target of each job."""
        return self.decide(demands, num_slots)
