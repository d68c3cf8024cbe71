"""One job: its record, which is stored, and the parts that say how far it has come; each part has one writer.

- `Job` itself: the record with its state (`lifecycle.py`), new items of the history, the position, the target.
- `generations`: which workers train, and which are to train (`generations.py`).
- `workers`: each worker that holds a slot (`worker.py`).
- `observer`: what it has shown of itself, for policies (`observations.py`).
- `load`: how many replicas it needs, if it is a service (`service_load.py`).
- `suspicions`: which members suspect which (`suspicions.py`).
- `backoff`, `start_backoff`, `growth_limit`: the hosts that the job avoids, its next start and size (`backoff.py`).

Worker ids rise within a job and are never used again; a worker that an allocation drops is never named again.
"""

from collections.abc import Iterable

from resile_shared.messages.allocations import Allocation, Loss
from resile_shared.messages.jobs import (
    MAX_COMMANDS,
    MAX_WARNINGS,
    FailureCounts,
    HistoryItem,
    Intent,
    JobRecord,
    JobState,
)
from resile_shared.messages.message import at
from resile_shared.messages.reports import Ready

from ...policies.demand import Target
from .backoff import GrowthLimit, HostBackoff, StartBackoff
from .generations import JobGenerations
from .lifecycle import Step, advance
from .observations import Observer
from .service_load import ServiceLoad
from .slot_sets import SlotId
from .suspicions import SuspicionTracker
from .worker import Phase, Worker

_NO_REASON = ("warning", "priority")
"""Kinds of history items that do not say why a job is in its state."""


class Job:
    """One job. Its record and its newest allocation are stored; agents and workers report the rest again and again."""

    def __init__(self, record: JobRecord, *, number: int) -> None:
        self.id = record.job
        self.record = record
        self.number = number
        self.generations = JobGenerations(active_number=record.generation)
        self.workers: dict[int, Worker] = {}
        self.suspicions = SuspicionTracker()
        self.observer = Observer()
        self.load = ServiceLoad()
        self.backoff = HostBackoff()
        self.start_backoff = StartBackoff()
        self.growth_limit = GrowthLimit()
        self.new_items: list[HistoryItem] = []
        """Items of the history that have not been handed over for storage yet."""
        self.iteration = record.iteration
        self.iteration_seen = record.iteration
        """The iteration as decisions know it: as of when the job was looked at last."""
        self.target = Target(0, "")
        self.num_assigned = 0
        """How many slots the newest decision found for the target."""
        self.target_reason = ""
        """Why its workers change, for the history, until they are as the target says; empty: they need not change."""
        self.change_reason = ""
        """What just happened to the job; its next generation is the response."""
        self.first_ready: int | None = None
        """The worker whose training call the others must agree with; None if an earlier scheduler received it."""

    @property
    def is_over(self) -> bool:
        """Whether its state is final."""
        return self.record.state.is_final

    @property
    def is_training(self) -> bool:
        """Whether it takes part in the sharing of slots."""
        waits = (JobState.PAUSED, JobState.ACCEPTED)
        return not (self.is_over or self.record.state in waits or self.record.completed) and (
            self.intent is Intent.TRAIN
        )

    @property
    def is_gang(self) -> bool:
        """Whether it has all its workers at once or none (`gangs.py`)."""
        return self.record.spec.gang

    @property
    def is_service(self) -> bool:
        """Whether its workers are replicas, which have no state that others continue."""
        return self.record.spec.service is not None

    @property
    def keeps_state(self) -> bool:
        """Whether its workers have a state, which checkpoints keep and which is that of one class of device."""
        return not (self.is_gang or self.is_service)

    @property
    def must_keep_slots(self) -> bool:
        """Whether it would be lost with any of its workers."""
        generations = self.generations
        may_run = generations.has_started or generations.is_cold_starting
        return self.is_gang and not self.record.spec.restartable and may_run

    @property
    def intent(self) -> Intent:
        """What the scheduler wants of the job while it holds workers."""
        return self.record.intent

    @property
    def least_workers(self) -> int:
        """Its minimum; it never needs more workers than it has shards."""
        ready, least = self.record.ready, self.record.spec.min_workers
        return min(least, ready.num_shards) if ready else least

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of workers that are allowed, rising; empty: any. It never needs more than it has shards.

        If its shards are too few for any size that its minimum allows, their number is its only size.
        """
        ready, sizes = self.record.ready, self.record.spec.sizes
        if ready is None or not sizes or sizes[-1] <= ready.num_shards:
            return sizes
        fitting = tuple(size for size in sizes if size <= ready.num_shards)
        return fitting if fitting and fitting[-1] >= self.least_workers else (ready.num_shards,)

    @property
    def has_batch_range(self) -> bool:
        """Whether its batch may change."""
        return self.record.ready is not None and self.record.ready.batch_range is not None

    @property
    def batch_size(self) -> int | None:
        """The global batch with which the newest generation trains; None: not known."""
        ready, generations = self.record.ready, self.generations
        if ready is None or not generations.is_batch_known:
            return None
        return generations.batch_size or ready.batch_size

    @property
    def smallest_size(self) -> int:
        """The smallest allowed number of workers that is not below its minimum."""
        return next((size for size in self.sizes if size >= self.least_workers), self.least_workers)

    def largest_size(self, number: int) -> int:
        """Return the largest allowed number of workers up to ``number``; 0 if there is none."""
        sizes = self.sizes
        return max((size for size in sizes if size <= number), default=0) if sizes else number

    @property
    def joiners(self) -> frozenset[int]:
        """Workers of the newest membership that do not train yet, as far as is known."""
        members = self.generations.members
        return frozenset(
            p.worker
            for p in self.generations.placements
            if p.worker not in members and (w := self.workers.get(p.worker)) and w.phase < Phase.MEMBER
        )

    @property
    def held(self) -> dict[int, SlotId]:
        """The workers of the newest membership that have not failed, and their slots, in rank order."""
        return {
            p.worker: worker.slot
            for p in self.generations.placements
            if (worker := self.workers.get(p.worker)) and not worker.has_failed
        }

    def unneeded(self, workers: Iterable[Worker]) -> list[Worker]:
        """Return those of ``workers`` that the job does not need, and that do not leave by themselves.

        Members leave after their last iteration, unless their job recovers without them; a joiner that was ordered may
        become a member until a generation without it is active.
        """
        alive = [worker for worker in workers if worker.phase < Phase.GONE]
        if self.is_over or not self.generations.placements:
            return alive
        waiting = [worker for worker in alive if worker.is_fenced or worker.phase < Phase.MEMBER]
        if not waiting:
            return []
        needed = self.generations.members if self.record.completed else self.generations.named
        return [worker for worker in waiting if worker.is_fenced or worker.number not in needed]

    def update(self, **changes: object) -> None:
        """Change the record."""
        self.record = self.record.model_copy(update=changes)

    def enter(self, step: Step) -> None:
        """Change the state. Raises IllegalStep."""
        self.update(state=advance(self.record.state, step))

    def intend(self, intent: Intent, reason: str, *, now: float) -> None:
        """End the job's training for now, as soon as a checkpoint is saved."""
        self.update(intent=intent)
        self.note(intent.value, reason, now=now)

    def note(
        self, kind: str, reason: str, *, now: float, iteration: int | None = None, loss: Loss | None = None
    ) -> None:
        """Add a numbered item to the history."""
        active = self.generations.active
        item = HistoryItem(
            number=self.record.num_items + 1,
            time=at(now),
            kind=kind,
            generation=self.record.generation,
            workers=len(active),
            slots=tuple(placement.slot_name for placement in active),
            iteration=self.iteration if iteration is None else iteration,
            reason=reason,
            batch_size=self.batch_size if kind == "allocation" and self.has_batch_range else None,
            loss=loss,
        )
        self.new_items.append(item)
        self.update(num_items=item.number, iteration=item.iteration)
        if self.is_over:
            self.update(ended=item.time)
        if kind not in _NO_REASON:
            self.update(kind=kind, reason=item.reason)
        if kind == "allocation":
            self.update(allocation=item)

    def warn(self, message: str, *, now: float) -> None:
        """Note a warning in the history, unless it has been noted before or there are too many."""
        warnings = self.record.warnings
        if message not in warnings and len(warnings) < MAX_WARNINGS:
            self.update(warnings=(*warnings, message))
            self.note("warning", message, now=now)

    def take_items(self) -> tuple[HistoryItem, ...]:
        """Return the new items of the history; each is returned once."""
        items, self.new_items = tuple(self.new_items), []
        return items

    def mark_applied(self, command: str) -> str | None:
        """Record that ``command`` was applied; return the one that is forgotten in its place, never the submission."""
        first, *others = (*self.record.applied_commands, command)
        forgotten = others.pop(0) if len(others) >= MAX_COMMANDS else None
        self.update(applied_commands=(first, *others))
        return forgotten

    def count_failures(self, **changes: object) -> FailureCounts:
        """Change the counts of failures; return them."""
        counts = self.record.failures.model_copy(update=changes)
        self.update(failures=counts)
        return counts

    def set_ready(self, ready: Ready, *, worker: int) -> None:
        """Record the first training call, which the others must agree with."""
        self.update(ready=ready)
        self.first_ready = worker

    def set_target(self, target: Target, cause: str, *, num_assigned: int, is_there: bool) -> None:
        """Take over what the policy decided, for how many workers there are slots, and whether these have them.

        ``cause`` is what happened since the last decision, if that was outside the job. It is the reason of all changes
        until the target is reached, unless something else changes the target or brings more slots.
        """
        has_more = bool(cause) and num_assigned > self.num_assigned
        if target.is_exact:
            self.target_reason = target.reason
        elif target.workers != self.target.workers or not (is_there or self.target_reason) or has_more:
            replaced = "replaces lost workers" if self.generations.is_recovering else ""
            self.target_reason = cause or self.change_reason or replaced or target.reason
        elif target.batch_size != self.target.batch_size:
            self.target_reason = f"batch of {target.batch_size}: {target.reason}"
        self.target, self.num_assigned = target, num_assigned

    def reach_target(self) -> None:
        """Record that it trains as its target says, so that a later change has another reason."""
        self.target_reason = ""

    def explain_change(self, reason: str) -> None:
        """Give the next generation its reason; empty: that of the target."""
        self.change_reason = reason

    def advance(self, iteration: int) -> None:
        """Record that ``iteration`` was reached."""
        self.iteration = max(self.iteration, iteration)

    def go_back(self, iteration: int) -> None:
        """Record that training goes on from ``iteration``."""
        self.iteration = iteration

    def release_slots(self) -> None:
        """Leave training: paused if a user asked for it, else back to the queue."""
        self.generations.deactivate()
        self.enter(Step.PAUSE if self.intent is Intent.PAUSE else Step.REQUEUE)
        self.update(intent=Intent.TRAIN)

    def restore(self, allocation: Allocation) -> None:
        """Take over ``allocation``, which an earlier scheduler stored."""
        self.generations.restore(allocation, self.record)
        self.target, self.num_assigned = Target(len(allocation.placements), ""), len(allocation.placements)
        self.target_reason = "the scheduler restarted" if self.generations.is_settling else ""
