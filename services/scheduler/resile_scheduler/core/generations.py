"""From the slots a job should have to its next generation.

- A founding generation may be changed until its order is given; from then on until it trains nothing else is written,
  since its members have to see it.
- A shrink waits for nothing: it names only workers that train already or are ready to. What it does not name and is
  wanted again comes back with a later growth.
- A growth names slots that are free now. It may supersede a growth that is under way, but not a shrink.
- A joiner that failed is withdrawn before anything else is done.
- If all members have to go, those who join take over from those who leave, in one generation.
- A target that is exact is not approached in steps: a growth towards it waits until all its slots are free. Only a
  generation that reaches the target carries the target's iterations; any other keeps that of the active generation.
- A new life of a job is founded only when every worker of the life before is gone.
- While a recovering generation is not in force, only a newer recovering generation is written over it. It names
  members alone; nobody joins by it.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from resile_shared.messages.allocations import Allocation, Placement

from .lifecycle import Step
from .placement import SlotId
from .policies import Target
from .state import Job, Phase, Pool, Worker


@dataclass(frozen=True)
class Change:
    """The next membership: who stays, on which slots somebody joins, and at which iterations it begins and ends."""

    kept: tuple[Placement, ...]
    joining: tuple[SlotId, ...] = ()
    not_before: int = 0
    until: int | None = None


def next_change(job: Job, target: Target, wanted: Sequence[SlotId], *, pool: Pool) -> Change | None:
    """Return what can be done now towards ``target`` on the slots ``wanted``; None if nothing, or it has to wait."""
    change = _next_membership(job, wanted, pool=pool)
    if change is None:
        return _next_schedule(job, target)
    size = len(change.kept) + len(change.joining)
    if size == target.workers:
        return replace(change, not_before=target.not_before, until=target.until)
    if target.is_exact and change.joining:
        return None
    return replace(change, until=job.active_until)


def _next_schedule(job: Job, target: Target) -> Change | None:
    """Return the same membership with other iterations, if it has the size of the target and those are what differs."""
    allocation = job.allocation
    if allocation is None or not _may_change(job) or not job.has_started or len(job.held) != target.workers:
        return None
    is_scheduled = allocation.until == target.until and (
        not job.is_settling or allocation.not_before == target.not_before
    )
    return None if is_scheduled else Change(allocation.placements, not_before=target.not_before, until=target.until)


def _may_change(job: Job) -> bool:
    return not (job.is_cold_starting or job.is_recovering or job.ended_at is not None)


def _next_membership(job: Job, wanted: Sequence[SlotId], *, pool: Pool) -> Change | None:
    held = job.held
    sound = tuple(p for p in job.placements if p.worker in held)
    kept = tuple(p for p in sound if held[p.worker] in wanted)
    joining = tuple(slot for slot in wanted if slot not in held.values() and pool.is_free(slot))
    if not _may_change(job):
        return None
    if not job.has_started:
        return _next_cold_start(job, kept, joining)
    if sound and len(sound) < len(job.placements):
        return Change(sound)
    if len(kept) < len(job.placements):
        settled = tuple(p for p in kept if _is_settled(job, p))
        if settled:
            return Change(settled)
        return Change(kept, joining) if kept or joining else None
    if joining and not (_is_due(job) and not job.joiners):
        return Change(kept, joining)
    return None


def _is_due(job: Job) -> bool:
    """Whether the newest generation is not active yet, and waits for no iteration."""
    return job.is_settling and job.allocation is not None and job.allocation.not_before <= job.iteration


def _next_cold_start(job: Job, kept: tuple[Placement, ...], joining: tuple[SlotId, ...]) -> Change | None:
    if not job.placements and job.workers:
        return None
    if len(kept) + len(joining) < job.least_workers:
        return Change(()) if job.placements else None
    return Change(kept, joining) if joining or len(kept) < len(job.placements) else None


def _is_settled(job: Job, placement: Placement) -> bool:
    """Whether a generation that names this worker waits for nothing of it."""
    worker = job.workers.get(placement.worker)
    return worker is not None and worker.address is not None and worker.phase in (Phase.READY, Phase.MEMBER)


class Generations:
    """Writes the generations of all jobs, as the scheduler of one epoch."""

    def __init__(self, pool: Pool, *, epoch: int, secret: str) -> None:
        self._pool = pool
        self._epoch = epoch
        self._secret = secret

    def carry_out(self, job: Job, change: Change, *, now: float) -> None:
        """Make ``change`` the newest generation of ``job``; those who join get new ids."""
        if not change.kept and not change.joining:
            self.cancel_start(job)
            return
        cold_start = not job.has_started
        placements = list(change.kept)
        for slot in change.joining:
            worker = Worker(job.record.next_worker, slot, self._pool.hosts[slot.host].record.incarnation, now)
            job.update(next_worker=worker.number + 1)
            self._pool.add_worker(job, worker)
            placements.append(
                Placement(worker=worker.number, host=slot.host, incarnation=worker.incarnation, slot=slot.number)
            )
        reason = job.change_reason or job.cause
        if cold_start:
            is_first = job.record.generation == 0 and not job.record.failures.failed_starts
            reason = "start" if is_first else "start again"
            if not job.placements:
                job.enter(Step.START)
        else:
            job.enter(Step.RESCALE)
        self._write(
            job, placements, cold_start=cold_start, reason=reason, not_before=change.not_before, until=change.until
        )

    def recover(self, job: Job, survivors: Sequence[Worker], *, reason: str) -> None:
        """Have ``survivors`` go on without all others, from the round that they left unfinished."""
        going_on = {worker.number for worker in survivors}
        for worker in job.workers.values():
            worker.is_fenced = worker.is_fenced or worker.number not in going_on
        placements = [
            Placement(worker=w.number, host=w.slot.host, incarnation=w.incarnation, slot=w.slot.number)
            for w in sorted(survivors, key=lambda w: w.number)
        ]
        job.accusations.clear()
        job.vanished = ""
        job.enter(Step.RECOVER)
        self._write(job, placements, is_recovery=True, reason=reason, until=job.active_until)
        self.give_order(job)

    def cancel_start(self, job: Job) -> None:
        """Give up a start: back to the queue."""
        self.abandon(job, "its start was given up")
        job.enter(Step.REQUEUE)

    def abandon(self, job: Job, reason: str) -> None:
        """End all workers of the job. Its next life, if it has one, begins with a founding generation."""
        if job.placements:
            self._write(job, (), reason=reason)
        job.orders.clear()
        job.unreconciled_slots = frozenset()
        job.ended_at = None
        job.accusations.clear()
        job.vanished = ""
        self._pool.changed()

    def give_order(self, job: Job) -> None:
        """Complete the newest allocation once all its workers can be reached.

        A job that was given no maximum starts with no more workers than it has shards, so its start waits for that.
        """
        allocation = job.allocation
        if allocation is None or not allocation.placements or allocation.generation in job.orders:
            return
        if not job.has_started and job.record.ready is None and job.record.spec.has_default_size:
            return
        addresses = [w.address if (w := job.workers.get(p.worker)) else None for p in allocation.placements]
        if not all(addresses):
            return
        named = tuple(
            placement.model_copy(update={"address": address})
            for placement, address in zip(allocation.placements, addresses, strict=True)
        )
        job.allocation = allocation.model_copy(update={"placements": named})
        job.orders[allocation.generation] = job.allocation
        self._pool.changed()

    def _write(
        self,
        job: Job,
        placements: Iterable[Placement],
        *,
        reason: str,
        cold_start: bool = False,
        is_recovery: bool = False,
        not_before: int = 0,
        until: int | None = None,
    ) -> None:
        generation = job.allocation.generation + 1 if job.allocation else 1
        job.allocation = Allocation(
            job=job.id,
            epoch=self._epoch,
            generation=generation,
            placements=tuple(placements),
            secret=self._secret_of(job.id, generation),
            cold_start=cold_start,
            resume=cold_start and (job.record.checkpoint is not None or job.record.generation > 0),
            is_recovery=is_recovery,
            not_before=not_before,
            until=until,
            reason=reason,
        )
        self._pool.changed()

    def _secret_of(self, job: str, generation: int) -> str:
        text = f"{job} {self._epoch} {generation}"
        return hmac.new(self._secret.encode(), text.encode(), hashlib.sha256).hexdigest()
