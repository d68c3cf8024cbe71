"""Replays a workload of profiled applications in simulated time, under any scheduler.

A job trains at the speed that its application's profile (`profiles`) has for its placement and batch, and needs as much
progress as the profile has epochs. Everything is deterministic.

There are two clocks. `Ticks` decides at a fixed interval: jobs first advance with what they have, and a completion in
between frees nothing before the tick. `Events` decides at every submission and completion, and at the latest a fixed
time after the last decision. Under both, a job whose workers change, also at its first start, loses time.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from resile_scheduler.simulation.arrivals import Arrival
from resile_scheduler.simulation.profiles import Placement
from resile_shared.errors import ResileError

Nodes = tuple[int, ...]
"""The node of each worker; workers of one node are adjacent."""

RESOLUTION_SECONDS = 1e-6
"""An epoch that ends at most this long after the simulated time counts as ended."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes."""

    num_nodes: int
    slots_per_node: int

    @property
    def num_slots(self) -> int:
        """All slots together."""
        return self.num_nodes * self.slots_per_node

    def free(self, allocations: Iterable[Nodes]) -> list[int]:
        """Return how many slots of each node are free beside ``allocations``."""
        used = Counter(node for nodes in allocations for node in nodes)
        return [self.slots_per_node - used[node] for node in range(self.num_nodes)]


@dataclass(frozen=True)
class Ticks:
    """Decide every ``seconds``."""

    seconds: float = 60.0
    change_seconds: float = 30.0
    """Seconds without training that a change costs a job."""

    @property
    def on_events(self) -> bool:
        """Whether submissions and completions are decided at once."""
        return False


@dataclass(frozen=True)
class Events:
    """Decide at submissions and completions, and ``seconds`` after the last decision."""

    seconds: float = 60.0
    change_seconds: float = 1.0

    @property
    def on_events(self) -> bool:
        """Whether submissions and completions are decided at once."""
        return True


Clock = Ticks | Events


class Overcommitted(ResileError):
    """A scheduler gave away slots that do not exist."""

    def __init__(self, free: Sequence[int]) -> None:
        nodes = ", ".join(str(node) for node, left in enumerate(free) if left < 0)
        super().__init__(f"the scheduler gave away more slots than these nodes have: {nodes}")


class Measurement(NamedTuple):
    """What a job measures while it trains: seconds of a step with an exchange, and of the exchange within it."""

    num_nodes: int
    num_workers: int
    local: int
    """The samples of one worker in the step."""
    step: float
    sync: float


@dataclass(frozen=True)
class Allocation:
    """What a job has: its workers, and the batch size that they train with."""

    nodes: Nodes = ()
    batch_size: int = 0


@dataclass(eq=False)
class ReplayedJob:
    """A job under way."""

    arrival: Arrival
    allocation: Allocation = Allocation()
    progress: float = 0.0
    """Progress, in iterations at the initial batch."""
    epoch: int = 0
    """How many epochs are complete."""
    attained: float = 0.0
    """Slot-seconds held, changes included."""
    completed: float | None = None
    """When it was completed, in seconds; None: not yet."""
    num_changes: int = 0
    """How often its workers changed; the first start does not count."""
    measurements: dict[Measurement, None] = field(default_factory=dict)
    """What it has measured, in the order in which it did so first."""
    gradient: tuple[float, float] = (0.0, 0.0)
    """Squared norm and variance at the initial batch, as measured last."""
    _placement: Placement = ()
    _to_lose: float = 0.0

    @property
    def name(self) -> str:
        """Its name in the workload."""
        return self.arrival.job

    @property
    def nodes(self) -> Nodes:
        """The node of each of its workers."""
        return self.allocation.nodes

    def assign(self, allocation: Allocation, *, change_seconds: float) -> None:
        """Give it these workers. It loses ``change_seconds`` when it gets other ones, not when it loses them all."""
        if allocation.nodes and allocation.nodes != self.nodes:
            self.num_changes += bool(self.attained)
            self._to_lose = change_seconds
        self.allocation = allocation
        self._placement = tuple(Counter(allocation.nodes).values())

    def advance(self, seconds: float, *, now: float) -> None:
        """Let ``seconds`` pass from ``now`` on, and train in them until it is complete."""
        if not self.nodes or self.completed is not None:
            return
        end = now + seconds
        lost = min(self._to_lose, seconds)
        self._to_lose -= lost
        now += lost
        while self.completed is None and not self._to_lose:
            if now < end:
                self._measure()
            speed = self._speed()
            to_epoch_end = self._to_epoch_end(speed)
            if now + to_epoch_end > end + RESOLUTION_SECONDS:
                self.progress += speed * (end - now)
                break
            now = min(now + to_epoch_end, end)
            self._end_epoch(now)
        until = end if self.completed is None else self.completed
        self.attained += (until - end + seconds) * len(self.nodes)

    def earliest_completion(self, *, now: float) -> float:
        """Return a time before which it cannot be complete: the end of its epoch."""
        return now + self._to_lose + self._to_epoch_end(self._speed()) if self.nodes else math.inf

    def _to_epoch_end(self, speed: float) -> float:
        return max(self.arrival.application.progress_after(self.epoch + 1) - self.progress, 0.0) / speed

    def _end_epoch(self, now: float) -> None:
        application = self.arrival.application
        self.epoch += 1
        self.progress = application.progress_after(self.epoch)
        if self.epoch == application.num_epochs:
            self.completed = now

    def _speed(self) -> float:
        return self.arrival.application.speed(self._placement, self.allocation.batch_size, self.epoch)

    def _measure(self) -> None:
        application, num_workers = self.arrival.application, len(self.nodes)
        local, steps = application.split(self.allocation.batch_size, num_workers)
        step, sync = application.step_times(self._placement, local)
        self.measurements.setdefault(Measurement(len(self._placement), num_workers, local, step, sync))
        self.gradient = application.gradient(num_workers * local * (steps + 1), self.epoch)


class Scheduler(Protocol):
    """Decides who has which slots."""

    def decide(self, jobs: Sequence[ReplayedJob], cluster: Cluster, *, now: float) -> dict[str, Allocation]:
        """Return what each job has from now on; one that is left out has nothing. Jobs come as they were submitted."""


@dataclass(frozen=True)
class Outcome:
    """What became of one job. Times are seconds; ``completed`` less ``submitted`` is its completion time."""

    job: str
    submitted: float
    completed: float
    num_changes: int
    slot_seconds: float

    @property
    def completion_time(self) -> float:
        """The seconds from submission to completion."""
        return self.completed - self.submitted


def replay(arrivals: Sequence[Arrival], scheduler: Scheduler, cluster: Cluster, clock: Clock) -> list[Outcome]:
    """Return what becomes of each job, in the order of ``arrivals``, once all are complete.

    Raises:
        Overcommitted: the scheduler gave away slots that the cluster does not have.

    """
    jobs = [ReplayedJob(arrival) for arrival in arrivals]
    waiting = sorted(jobs, key=lambda job: job.arrival.time)
    active: list[ReplayedJob] = []
    now = decided = 0.0
    while waiting or active:
        then = _next_time(waiting, active, clock, now=now, decided=decided)
        for job in active:
            job.advance(then - now, now=now)
        now = then
        is_due = now >= decided + clock.seconds
        while waiting and waiting[0].arrival.time <= now:
            active.append(waiting.pop(0))
            is_due = is_due or clock.on_events
        remaining = [job for job in active if job.completed is None]
        is_due = is_due or (clock.on_events and len(remaining) < len(active))
        if is_due:
            active, decided = remaining, now
            _decide(active, scheduler, cluster, clock, now=now)
    return [_outcome(job) for job in jobs]


def _next_time(
    waiting: Sequence[ReplayedJob], active: Sequence[ReplayedJob], clock: Clock, *, now: float, decided: float
) -> float:
    """Return when something can happen that the clock decides at."""
    if not clock.on_events:
        return decided + clock.seconds
    submission = waiting[0].arrival.time if waiting else math.inf
    due = decided + clock.seconds if active else math.inf
    return min(submission, due, *(job.earliest_completion(now=now) for job in active))


def _decide(jobs: Sequence[ReplayedJob], scheduler: Scheduler, cluster: Cluster, clock: Clock, *, now: float) -> None:
    allocations = scheduler.decide(jobs, cluster, now=now)
    if min(free := cluster.free(allocation.nodes for allocation in allocations.values())) < 0:
        raise Overcommitted(free)
    for job in jobs:
        job.assign(allocations.get(job.name, Allocation()), change_seconds=clock.change_seconds)


def _outcome(job: ReplayedJob) -> Outcome:
    assert job.completed is not None
    return Outcome(
        job=job.name,
        submitted=job.arrival.time,
        completed=job.completed,
        num_changes=job.num_changes,
        slot_seconds=job.attained,
    )
