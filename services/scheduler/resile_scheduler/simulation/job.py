"""A simulated job and its workers: how far they have come."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Address

from .training import Pace, WorkersByHost
from .workload import Submission

RESOLUTION = 1e-9
"""The error that rounding may leave in a number of iterations, relative to it."""
CLOCK_RESOLUTION = 1e-6
"""Times less than this many seconds apart are equal: seconds since the epoch are rounded to 0.24 microseconds."""


@dataclass(eq=False)
class SimulatedWorker:
    """One worker, as its agent sees it."""

    job: "SimulatedJob"
    number: int
    host: str
    slot: int
    state: Literal["starting", "ready", "member", "left"] = "starting"
    address: Address | None = None
    generation: int = 0

    @property
    def is_named(self) -> bool:
        """Whether the newest allocation names it."""
        allocation = self.job.allocation
        return allocation is not None and any(p.worker == self.number for p in allocation.placements)


@dataclass(frozen=True)
class Stretch:
    """Iterations at one pace, one after the other, from ``begun`` on."""

    begun: float
    pace: Pace
    iteration: int
    """The first iteration."""
    done: float
    """The work done before the first iteration."""

    def num_complete(self, now: float) -> int:
        """Return how many iterations are complete at ``now``."""
        return max(0, math.floor((now - self.begun + CLOCK_RESOLUTION) / self.pace.seconds + RESOLUTION))

    def num_by(self, time: float) -> int:
        """Return how many iterations have to be complete for ``time`` to have come."""
        return math.ceil((time - self.begun - CLOCK_RESOLUTION) / self.pace.seconds - RESOLUTION)

    def num_until(self, done: float) -> int:
        """Return after how many iterations ``done`` work is done: at least one."""
        return max(1, math.ceil((done - self.done) / self.pace.work * (1 - RESOLUTION)))

    def end_of(self, num: int) -> float:
        """Return when ``num`` iterations are complete."""
        return self.begun + num * self.pace.seconds


class Position(NamedTuple):
    """Where a job goes on from a checkpoint."""

    iteration: int = 0
    done: float = 0.0
    """The work done before ``iteration``."""
    batch_size: int = 0


@dataclass(eq=False)
class SimulatedJob:
    """A job as its workers see it."""

    submission: Submission
    workers: dict[int, SimulatedWorker] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    generation: int = 0
    lineage: int = 0
    allocation: Allocation | None = None
    orders: list[Allocation] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)  # all that ever were members
    stretch: Stretch | None = None  # None: it does not train
    boundary: int = 0  # the number of the boundary that is scheduled; others have no effect
    iteration: int = 0  # committed before the stretch
    done: float = 0.0
    batch_size: int = 0
    checkpoint: Position | None = None
    checkpoint_time: float = 0.0
    life: int = 0  # what an earlier life has in flight has no effect
    is_pausing: bool = False
    is_complete: bool = False
    is_removed: bool = False

    @property
    def id(self) -> str:
        """The job's id."""
        return self.submission.job

    @property
    def missing(self) -> list[int]:
        """Members whose processes are gone: the round in flight never ends."""
        return [number for number in self.members if number not in self.workers]

    @property
    def members_by_host(self) -> WorkersByHost:
        """How many members there are on each host."""
        return tuple(sorted(Counter(self.workers[number].host for number in self.members).values()))

    def iteration_at(self, now: float) -> int:
        """Return how many iterations are committed at ``now``."""
        return self.stretch.iteration + self.stretch.num_complete(now) if self.stretch else self.iteration

    def stop_training(self, now: float) -> None:
        """Keep what is committed at ``now``; the iteration in flight is lost."""
        if self.stretch is not None:
            self.commit(self.stretch.num_complete(now))
        self.stretch = None
        self.boundary += 1

    def commit(self, num: int) -> None:
        """Record that ``num`` iterations of the stretch are committed."""
        assert self.stretch is not None
        self.iteration = self.stretch.iteration + num
        self.done = self.stretch.done + num * self.stretch.pace.work

    def newest_formed(self) -> Allocation | None:
        """Return the newest order whose joiners are all at their training call."""
        for order in reversed(self.orders):
            joiners = [p.worker for p in order.placements if p.worker not in self.members]
            if order.generation > self.generation and all(
                number in self.workers and self.workers[number].state == "ready" for number in joiners
            ):
                return order
        return None
