"""What a scheduler measures of the pool, from the events that its core handles and the commands that it returns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import Meter

from resile_shared.messages.jobs import JobRecord, JobState
from resile_shared.messages.reports import Report, Switched
from resile_shared.telemetry.metrics import LONG_SECONDS, gauge, histogram

from .core.core import Scheduler
from .core.events import Command, Event, JobRemoved, StateRestored, StoreJob, Tick
from .core.restart import RestartableScheduler

_WAITING = (JobState.ACCEPTED, JobState.QUEUED)
_HOLDING = (JobState.RUNNING, JobState.RESCALING, JobState.RECOVERING)


@dataclass
class _Known:
    """A job as its newest record has it."""

    state: JobState
    since: float | None
    """When it entered the state; None: not known, as this was before this scheduler led."""
    workers: int
    trains: bool = False
    """Whether its workers commit iterations: those of gangs and services do not."""


class SchedulerMetrics:
    """The metrics of a scheduler that leads."""

    def __init__(self, meter: Meter, core: Scheduler | RestartableScheduler) -> None:
        self._core = core
        self._jobs: dict[str, _Known] = {}
        self._ticked: float | None = None
        self._decision = histogram(meter, "resile_decision", "Time that the scheduler's core takes for one event.")
        self._pause = histogram(meter, "resile_training_pause", "For how long a change of workers stopped training.")
        self._left = {
            JobState.STARTING: histogram(
                meter, "resile_job_start", "Time from the allocation of a cold start until it trains."
            ),
            JobState.RESCALING: histogram(
                meter, "resile_job_change", "Time from the decision to change a job's workers until it is in effect."
            ),
            JobState.RECOVERING: histogram(
                meter, "resile_job_recovery", "Time from a known loss of workers until the others train on."
            ),
        }
        self._wait = histogram(
            meter,
            "resile_queue_wait",
            "Time that jobs waited for their first slots, or next ones.",
            buckets=LONG_SECONDS,
        )
        self._ended = meter.create_counter(
            "resile_jobs_ended", description="Jobs that have ended, by their last state."
        )
        self._idle = meter.create_counter(
            "resile_idle_slot", "s", "Slot-seconds in which slots were free that a job could use."
        )
        self._idle.add(0.0)  # exported from the start: a missing counter cannot rise
        gauge(meter, "resile_jobs", self._by_state, "Jobs by state.", label="state")
        gauge(meter, "resile_slots", self._slots, "Slots of hosts that are up, by what becomes of them.", label="state")
        gauge(meter, "resile_workers", self._workers, "Members of active generations.")
        gauge(
            meter, "resile_training_workers", self._training, "Members of active generations of jobs with iterations."
        )
        gauge(meter, "resile_job_workers", self._workers_of, "Members of the active generation of a job.", label="job")
        gauge(meter, "resile_scheduler_epoch", lambda: core.epoch, "The epoch of the leading scheduler.")

    def on_handled(self, event: Event, commands: Sequence[Command], *, seconds: float, now: float) -> None:
        """Count what ``event``, which the core handled within ``seconds``, has brought about."""
        self._decision.record(seconds)
        match event:
            case StateRestored(jobs=jobs):
                for record in jobs:
                    known = _Known(record.state, _waiting_since(record), _workers_of(record), _trains(record))
                    self._jobs[record.job] = known
            case Report(content=Switched(pause_seconds=pause)):
                self._pause.record(pause)
            case JobRemoved(job):
                self._jobs.pop(job, None)
            case Tick():
                self._count_idle(now)
        for command in commands:
            if isinstance(command, StoreJob):
                self._on_record(command.record, now)

    def _on_record(self, record: JobRecord, now: float) -> None:
        known = self._jobs.get(record.job) or _Known(JobState.ACCEPTED, record.submitted.timestamp(), 0)
        self._jobs[record.job] = known
        known.workers, known.trains = _workers_of(record), _trains(record)
        if record.state is known.state:
            return
        if not (known.state in _WAITING and record.state in _WAITING):
            if known.since is not None:
                self._on_state_left(known, record.state, max(0.0, now - known.since))
            known.since = now
        known.state = record.state
        if record.state.is_final:
            self._ended.add(1, {"state": record.state})

    def _on_state_left(self, known: _Known, entered: JobState, seconds: float) -> None:
        if known.state in _WAITING and entered is JobState.STARTING:
            self._wait.record(seconds)
        elif known.state in self._left and entered is JobState.RUNNING:
            self._left[known.state].record(seconds)

    def _count_idle(self, now: float) -> None:
        """Count the time since the last tick, as if what is free and wanted now had been so since then."""
        counts = self._core.slot_counts()
        if self._ticked is not None:
            self._idle.add(min(counts.free, counts.wanted) * max(0.0, now - self._ticked))
        self._ticked = now

    def _by_state(self) -> Mapping[str, float]:
        counts = Counter(known.state for known in self._jobs.values())
        return {state: counts[state] for state in JobState}

    def _slots(self) -> Mapping[str, float]:
        counts = self._core.slot_counts()
        return {"free": counts.free, "held": counts.held}

    def _workers(self) -> float:
        return sum(known.workers for known in self._jobs.values())

    def _training(self) -> float:
        return sum(known.workers for known in self._jobs.values() if known.trains)

    def _workers_of(self) -> Mapping[str, float]:
        return {job: known.workers for job, known in self._jobs.items() if not known.state.is_final}


def _workers_of(record: JobRecord) -> int:
    return record.allocation.workers if record.allocation and record.state in _HOLDING else 0


def _trains(record: JobRecord) -> bool:
    return not (record.spec.gang or record.spec.service)


def _waiting_since(record: JobRecord) -> float | None:
    return record.waiting_since.timestamp() if record.state in _WAITING and record.waiting_since else None
