"""How many slots each job held over time: a pure function of the pool's events, in the order of their sequences.

An event may be handled again: each part knows the newest event that it includes. An event counts at its own time, but
never later than it was stored and never before the previous event, because clocks of machines may be wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from resile_shared.http.slot_history import JobStepsView, MarkView, SlotsView, StepsView
from resile_shared.messages.hosts import HostDraining, HostEvent, HostJoined, HostLeft, HostLost
from resile_shared.messages.jobs import JobEvent, JobRecord, JobState
from resile_shared.messages.pool import PolicyEvent
from resile_shared.messages.slot_history import (
    MAX_JOB_MARKS,
    MAX_POOL_MARKS,
    MAX_PRESENT,
    JobSlots,
    Mark,
    MarkKind,
    PoolSlots,
)

from .steps import FINEST_MS, Steps

MAX_JOBS_SHOWN = 500
MAX_MARKS_SHOWN = 2000
NUM_SHOWN = 256
"""An answer has from this many to twice as many steps for a series that changes often."""
_HOLDS_NONE = (JobState.QUEUED, JobState.PAUSED)
_HOST_MARKS: dict[type[HostEvent], MarkKind] = {
    HostJoined: "joined",
    HostDraining: "draining",
    HostLost: "lost",
    HostLeft: "left",
}


@dataclass
class JobHistory:
    """The slots of one job over time."""

    sequence: int = 0
    held: Steps = field(default_factory=Steps)
    marks: list[Mark] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """When it changed last, in milliseconds since the epoch."""
        return max([self.held.newest, *(mark.time for mark in self.marks[-1:])])

    def add(self, event: JobEvent, *, time: int, sequence: int) -> bool:
        """Add an event; returns whether it is new."""
        if sequence <= self.sequence:
            return False
        self.sequence = sequence
        self.held.add(time, slots_held(event))
        if event.item.number == 1:
            self.marks.append(Mark(time=time, kind="submitted", about=event.job))
        elif event.item.kind == "priority":
            self.marks.append(Mark(time=time, kind="priority", about=event.job, text=str(event.priority)))
        if len(self.marks) > MAX_JOB_MARKS:
            del self.marks[1]  # the submission stays
        return True

    def message(self, *, sequence: int) -> JobSlots:
        """Return the message to store when all events up to ``sequence`` were handled."""
        return JobSlots(sequence=max(sequence, self.sequence), held=self.held.message(), marks=tuple(self.marks))

    @classmethod
    def of(cls, stored: JobSlots) -> "JobHistory":
        """Return a history that goes on from what is stored."""
        return cls(stored.sequence, Steps.of(stored.held), list(stored.marks))


@dataclass
class PoolHistory:
    """The slots of the pool over time."""

    sequence: int = 0
    hosts: Steps = field(default_factory=Steps)
    slots: Steps = field(default_factory=Steps)
    held: Steps = field(default_factory=Steps)
    marks: list[Mark] = field(default_factory=list)
    present: dict[str, int] = field(default_factory=dict)
    holding: dict[str, int] = field(default_factory=dict)
    newest: int = 0
    """Time of the newest event, in milliseconds since the epoch."""

    @property
    def oldest(self) -> int:
        """Time of the oldest event that is still reflected, in milliseconds since the epoch."""
        times = [*self.slots.times[:1], *self.held.times[:1], *(mark.time for mark in self.marks[:1])]
        return min(times, default=self.newest)

    def add(self, event: BaseModel, *, time: int, sequence: int) -> bool:
        """Add an event; returns whether it is new."""
        if sequence <= self.sequence:
            return False
        self.sequence = sequence
        self.newest = max(self.newest, time)
        match event:
            case JobEvent():
                self.held.add(time, self.held.last + _put(self.holding, event.job, slots_held(event)))
            case HostEvent():
                self._add_host(event, time)
            case PolicyEvent():
                self._mark(Mark(time=time, kind="policy", about="pool", text=event.policy))
        return True

    def release(self, job: str) -> None:
        """Note that a job holds no slots, although no event says so: it was removed with its events."""
        self.held.add(self.newest, self.held.last + _put(self.holding, job, 0))

    def _add_host(self, event: HostEvent, time: int) -> None:
        num_slots = len(event.slots) if isinstance(event, HostJoined | HostDraining) else 0
        if num_slots or not isinstance(event, HostDraining):
            self.slots.add(time, self.slots.last + _put(self.present, event.host, num_slots))
            self.hosts.add(time, len(self.present))
        self._mark(Mark(time=time, kind=_HOST_MARKS[type(event)], about=event.host))

    def _mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        if len(self.marks) > MAX_POOL_MARKS:
            del self.marks[0]

    def message(self) -> PoolSlots:
        """Return what is stored of it."""
        return PoolSlots(
            sequence=self.sequence,
            newest=self.newest,
            hosts=self.hosts.message(),
            slots=self.slots.message(),
            held=self.held.message(),
            marks=tuple(self.marks),
            present=self.present,
            holding=self.holding,
        )

    @classmethod
    def of(cls, stored: PoolSlots) -> "PoolHistory":
        """Return a history that goes on from what is stored."""
        return cls(
            stored.sequence,
            Steps.of(stored.hosts),
            Steps.of(stored.slots),
            Steps.of(stored.held),
            list(stored.marks),
            dict(stored.present),
            dict(stored.holding),
            stored.newest,
        )


def slots_held(event: JobEvent) -> int:
    """Return how many slots a job holds after an event."""
    return 0 if event.state.is_final or event.state in _HOLDS_NONE else event.item.workers


def slots_view(pool: PoolHistory, jobs: Iterable[tuple[JobRecord, JobHistory]], *, seconds: int) -> SlotsView:
    """Return the last ``seconds`` before the newest event; if there are many jobs, those that held the most slots."""
    begin = max(pool.oldest, pool.newest - 1000 * seconds)
    finest = max(FINEST_MS, 1 << ((pool.newest - begin) // (2 * NUM_SHOWN)).bit_length())

    def shown(steps: Steps) -> Steps:
        return steps.since(begin, pool.newest, finest=finest)

    marks = list(pool.marks)
    found: list[tuple[JobRecord, Steps]] = []
    for record, history in jobs:
        marks += history.marks
        if any((steps := shown(history.held)).values):
            found.append((record, steps))
    found.sort(key=lambda job: -job[1].area(pool.newest))
    found = sorted(found[:MAX_JOBS_SHOWN], key=lambda job: (job[0].submitted, job[0].job))
    return SlotsView(
        sequence=pool.sequence,
        begin=begin,
        end=pool.newest,
        hosts=_view(shown(pool.hosts)),
        slots=_view(shown(pool.slots)),
        held=_view(shown(pool.held)),
        jobs=tuple(JobStepsView(id=job.job, name=job.spec.name, held=_view(steps)) for job, steps in found),
        marks=_marks_view(marks, begin),
    )


def _view(steps: Steps) -> StepsView:
    return StepsView(times=tuple(steps.times), values=tuple(steps.values))


def _marks_view(marks: Sequence[Mark], begin: int) -> tuple[MarkView, ...]:
    in_order = sorted((mark for mark in marks if mark.time >= begin), key=lambda mark: (mark.time, mark.about))
    return tuple(MarkView(**mark.model_dump()) for mark in in_order[-MAX_MARKS_SHOWN:])


def _put(numbers: dict[str, int], key: str, number: int) -> int:
    """Set a number, or remove it if it is 0; return by how much it has changed."""
    before = numbers.pop(key, 0)
    if number and len(numbers) < MAX_PRESENT:
        numbers[key] = number
    return numbers.get(key, 0) - before
