"""What became of the jobs of a simulation: when they ended, and how many slots they had in between."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from resile_shared.messages.jobs import HistoryItem, JobState

from ..core.events import StoreJob
from .workload import Submission, Workload

Steps = tuple[tuple[float, int], ...]
"""Times, each with the number that holds from then on."""
_WITHOUT_SLOTS = ("completed", "failed", "stopped", "paused", "queued")
"""Kinds of history items after which a job holds no slots."""


@dataclass
class JobOutcome:
    """One job. Times are seconds after the start; None: it never happened."""

    submission: Submission
    state: JobState = JobState.ACCEPTED
    started: float | None = None
    ended: float | None = None
    num_changes: int = 0
    """How often its slots changed; a start does not count."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """How many workers it trained with, from each time on."""
    _slots: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it completed."""
        return self.state is JobState.COMPLETED

    @property
    def seconds(self) -> float | None:
        """Seconds from submission to completion; None if it did not complete."""
        return self.ended - self.submission.time if self.is_complete and self.ended is not None else None

    @property
    def wait(self) -> float | None:
        """Seconds from submission to the first iteration; None if it never trained."""
        return None if self.started is None else self.started - self.submission.time

    @property
    def met_deadline(self) -> bool:
        """Whether it had a deadline, and completed by it."""
        deadline, seconds = self.submission.deadline, self.seconds
        return deadline is not None and seconds is not None and self.submission.time + seconds <= deadline

    def add(self, item: HistoryItem, *, time: float) -> None:
        """Take an item of its history into account."""
        if item.kind == "allocation":
            self._hold(item.slots, time)
        elif item.kind in _WITHOUT_SLOTS:
            self._hold((), time)

    def _hold(self, slots: tuple[str, ...], time: float) -> None:
        if self.started is None and slots:
            self.started = time
        self.num_changes += bool(self._slots and slots and set(slots) != set(self._slots))
        self._slots = slots
        if len(slots) != (self.steps[-1][1] if self.steps else 0):
            self.steps.append((time, len(slots)))


@dataclass(frozen=True)
class Outcome:
    """One simulation: what became of each job, in the order of submission, and how many slots the pool had."""

    name: str
    jobs: tuple[JobOutcome, ...]
    capacity: Steps
    slots_per_host: int
    """How many slots the largest host has."""
    end: float
    """When the last job ended; if some jobs never did, when nothing could happen to them any more."""

    @property
    def num_slots(self) -> int:
        """The most slots that the pool had."""
        return max((number for _, number in self.capacity), default=0)


class Recorder:
    """Records what a simulated pool stores of its jobs, and how many slots it has."""

    def __init__(self, workload: Workload) -> None:
        self._jobs = {submission.job: JobOutcome(submission) for submission in workload.submissions}
        self._capacity: list[tuple[float, int]] = []
        self._slots_per_host = max((change.num_slots for change in workload.hosts), default=1)
        self.num_ended = 0

    def on_stored(self, stored: StoreJob, *, time: float) -> None:
        """Record what was stored ``time`` seconds after the start."""
        job = self._jobs[stored.record.job]
        job.state = stored.record.state
        for item in stored.items:
            job.add(item, time=time)
        if job.state.is_final and job.ended is None:
            job.ended = time
            self.num_ended += 1

    def on_capacity(self, num_slots: int, *, time: float) -> None:
        """Record that the pool has ``num_slots`` slots from ``time`` on."""
        self._capacity.append((time, num_slots))

    def outcome(self, name: str, *, end: float) -> Outcome:
        """Return what became of the jobs; ``end`` is when the simulation ended."""
        jobs = tuple(self._jobs.values())
        last = max((job.ended for job in jobs if job.ended is not None), default=end)
        end = last if self.num_ended == len(jobs) else end
        return Outcome(name, jobs, tuple(self._capacity), self._slots_per_host, end)


def slot_seconds(steps: Iterable[tuple[float, int]], *, end: float) -> float:
    """Return the area below ``steps``, up to ``end``."""
    area, since, number = 0.0, 0.0, 0
    for time, next_number in (*steps, (end, 0)):
        area += number * (min(time, end) - since)
        since, number = min(time, end), next_number
    return area
