"""From the slots a job should have to its next generation.

- A cold start may be changed until its order is given; from then on until it trains no other generation is written,
  since its members have to see it. It can be cancelled, as long as a member is known not to be ready: none trains yet.
- A shrink waits for nothing: it names only workers that train already or are ready to. A worker that it does not name
  and that is wanted again comes back with a later growth.
- A growth names slots that are free now. It may supersede a growth that is not active yet, but not a shrink.
- A joiner that failed is withdrawn first.
- If all members have to leave, the joiners take over from them in one generation.
- A target that is exact is not approached in steps: a growth towards it waits until all its slots are free. Only a
  generation that reaches the target carries the target's iterations; any other keeps that of the active generation.
- A job with allowed sizes grows and starts by as many workers as make one of these.
- The batch changes with the number of workers, or alone: then a generation of the same members has another one.
- A gang starts with all its workers, and its membership never changes: a start that lacks one is cancelled.
- A job starts again only when every worker of the start before is gone.
- While a recovering generation is not active, only a newer recovering generation is written over it. It names
  members alone; nobody joins by it.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from resile_shared.messages.allocations import Allocation, Loss, Placement, StoredCheckpoint
from resile_shared.messages.hosts import HostState

from ..policies.demand import Target
from .state.job import Job
from .state.lifecycle import Step
from .state.pool import Pool
from .state.slot_sets import SlotId
from .state.topology import neighbors
from .state.worker import Phase, Worker


@dataclass(frozen=True)
class Change:
    """The next membership: who stays, on which slots workers join, and at which iterations it begins and ends."""

    kept: tuple[Placement, ...]
    joining: tuple[SlotId, ...] = ()
    not_before: int = 0
    until: int | None = None
    batch_size: int | None = None


NO_CHANGE = Change(())


def next_change(
    job: Job, target: Target, wanted: Sequence[SlotId], *, free: frozenset[SlotId], pool: Pool
) -> Change | None:
    """Return what can be done now towards ``target`` on the slots ``wanted``; None: nothing, or it has to wait.

    Workers may be started only on those slots that are ``free``.
    """
    if job.is_gang and job.generations.is_cold_starting:  # its scripts may already be running
        return None
    change = _next_membership(job, wanted, free=free, pool=pool)
    if change is None:
        return _next_schedule(job, target)
    size = len(change.kept) + len(change.joining)
    if size == target.workers:
        batch = target.batch_size or _present_batch(job)
        return replace(change, not_before=target.not_before, until=target.until, batch_size=batch)
    if target.is_exact and change.joining:
        return None
    return replace(change, until=job.generations.active_until, batch_size=_batch_on_the_way(job, target, size))


def _present_batch(job: Job) -> int | None:
    return job.batch_size if job.has_batch_range else None


def _batch_on_the_way(job: Job, target: Target, workers: int) -> int | None:
    """Return the batch for another number of workers than the target's.

    The smaller of both batches suits either number, as far as it has samples for all workers.
    """
    present, declared = _present_batch(job), job.record.ready and job.record.ready.batch_range
    if not (present and target.batch_size and declared):
        return present
    enough = min(workers * declared.least_per_slot, max(present, target.batch_size))
    return max(min(present, target.batch_size), enough)


def _next_schedule(job: Job, target: Target) -> Change | None:
    """Return the same membership with other iterations or another batch, if it has the size of the target."""
    allocation = job.generations.newest
    if allocation is None or not _may_change(job) or not job.generations.has_started or len(job.held) != target.workers:
        return None
    is_scheduled = allocation.until == target.until and (
        not job.generations.is_settling or allocation.not_before == target.not_before
    )
    has_batch = target.batch_size in (None, job.batch_size) or job.generations.is_settling
    if is_scheduled and has_batch:
        return None
    batch = target.batch_size or _present_batch(job)
    return Change(allocation.placements, not_before=target.not_before, until=target.until, batch_size=batch)


def _may_change(job: Job) -> bool:
    generations = job.generations
    return not (generations.is_cold_starting or generations.is_recovering or generations.gone_since is not None)


def _next_membership(job: Job, wanted: Sequence[SlotId], *, free: frozenset[SlotId], pool: Pool) -> Change | None:
    held = job.held
    sound = tuple(p for p in job.generations.placements if p.worker in held)
    kept = tuple(p for p in sound if held[p.worker] in wanted)
    joining = tuple(slot for slot in wanted if slot in free and slot not in held.values())
    if not _may_change(job):
        return Change(()) if not wanted and _cannot_train_yet(job, pool) else None
    if not job.generations.has_started:
        return _next_cold_start(job, kept, joining)
    joining = joining[: max(job.largest_size(len(kept) + len(joining)) - len(kept), 0)]
    if sound and len(sound) < len(job.generations.placements):
        return Change(sound)
    if len(kept) < len(job.generations.placements):
        settled = tuple(p for p in kept if _is_settled(job, p))
        if settled:
            return Change(settled)
        return Change(kept, joining) if kept or joining else None
    if joining and not (_is_due(job) and not job.joiners):
        return Change(kept, joining)
    return None


def _cannot_train_yet(job: Job, pool: Pool) -> bool:
    """Whether an initial member has not reached its training call, by what its host reports to this scheduler."""
    starting = [worker for worker in job.workers.values() if worker.phase is Phase.STARTING]
    hosts = (pool.hosts.get(worker.slot.host) for worker in starting)
    return job.generations.is_cold_starting and any(host is not None and host.is_heard for host in hosts)


def _is_due(job: Job) -> bool:
    """Whether the newest generation is not active yet, and need not wait for an iteration."""
    newest = job.generations.newest
    return job.generations.is_settling and newest is not None and newest.not_before <= job.iteration


def _next_cold_start(job: Job, kept: tuple[Placement, ...], joining: tuple[SlotId, ...]) -> Change | None:
    if not job.generations.placements and job.workers:
        return None
    size = job.largest_size(len(kept) + len(joining))
    kept, joining = kept[:size], joining[: max(size - len(kept), 0)]
    is_torn = job.is_gang and bool(job.generations.placements) and len(kept) < len(job.generations.placements)
    if is_torn or len(kept) + len(joining) < job.least_workers:
        return Change(()) if job.generations.placements else None
    return Change(kept, joining) if joining or len(kept) < len(job.generations.placements) else None


def _is_settled(job: Job, placement: Placement) -> bool:
    """Whether a generation that names this worker need not wait for it."""
    worker = job.workers.get(placement.worker)
    return worker is not None and worker.address is not None and worker.phase in (Phase.READY, Phase.MEMBER)


class Allocator:
    """Writes the generations of all jobs, as the leader of one epoch."""

    def __init__(self, pool: Pool, *, epoch: int, secret: str) -> None:
        self._pool = pool
        self._epoch = epoch
        self._secret = secret

    def apply(self, job: Job, change: Change, *, now: float) -> None:
        """Make ``change`` the newest generation of ``job``; joiners get new ids."""
        if not change.kept and not change.joining:
            self.cancel_start(job, may_have_trained=False)
            return
        cold_start = not job.generations.has_started
        placements = list(change.kept)
        for slot in change.joining:
            worker = Worker(job.record.next_worker, slot, self._pool.hosts[slot.host].record.incarnation, now)
            job.update(next_worker=worker.number + 1)
            self._pool.add_worker(job, worker)
            placements.append(
                Placement(worker=worker.number, host=slot.host, incarnation=worker.incarnation, slot=slot.number)
            )
        reason = job.change_reason or self._draining(job, change) or job.target_reason
        if cold_start:
            is_first = job.record.generation == 0 and not job.record.failures.failed_starts
            reason = "start" if is_first else "start again"
            if not job.generations.placements:
                job.enter(Step.START)
        else:
            job.enter(Step.RESCALE)
        self._write(job, placements, reason=reason, cold_start=cold_start, change=change)

    def _draining(self, job: Job, change: Change) -> str:
        """Return which draining hosts ``change`` leaves; empty if none: then it is what the policy decided."""
        hosts = self._pool.hosts
        left = {placement.host for placement in job.generations.placements if placement not in change.kept}
        draining = sorted(name for name in left & hosts.keys() if hosts[name].record.state is HostState.DRAINING)
        return ", ".join(f"{name} draining" for name in draining)

    def recover(self, job: Job, survivors: Sequence[Worker], *, loss: Loss) -> None:
        """Let ``survivors`` continue without all others, from the round that they left unfinished."""
        going_on = {worker.number for worker in survivors}
        for worker in job.workers.values():
            if worker.number not in going_on:
                worker.fence()
        placements = [
            Placement(worker=w.number, host=w.slot.host, incarnation=w.incarnation, slot=w.slot.number)
            for w in sorted(survivors, key=lambda w: w.number)
        ]
        job.suspicions.clear()
        job.enter(Step.RECOVER)
        change = Change((), until=job.generations.active_until)
        self._write(job, placements, is_recovery=True, reason=loss.reason, loss=loss, change=change)
        self.give_order(job)

    def cancel_start(self, job: Job, *, may_have_trained: bool) -> None:
        """Cancel a start, and queue the job again: for any class of device, unless it has one or may have trained."""
        if job.generations.is_bound_by_start and not may_have_trained:
            job.update(device_class="")
        self.abandon(job, "its start was cancelled")
        job.enter(Step.REQUEUE)

    def abandon(self, job: Job, reason: str) -> None:
        """Stop all workers of the job. If it continues, then with a cold start."""
        if job.generations.placements:
            self._write(job, (), reason=reason)
        job.generations.abandon()
        job.suspicions.clear()
        self._pool.touch(job)

    def activate(self, job: Job, generation: int, *, iteration: int, now: float) -> None:
        """Record that ``generation`` trains from ``iteration`` on; workers that it does not name have left."""
        if generation <= job.record.generation or generation not in job.generations.orders:
            return
        order = job.generations.orders[generation]
        has_grown = len(order.placements) > len(job.generations.active)
        job.generations.activate(order, iteration=iteration)
        if order.cold_start:
            job.go_back(iteration)
            job.start_backoff.begin(iteration)
        else:
            job.advance(iteration)
        job.suspicions.drop_accusations()
        failures = job.record.failures
        job.update(generation=generation)
        job.count_failures(
            iteration=max(failures.iteration, iteration) if order.is_recovery else failures.iteration,
            failed_starts=0,
            unlinked_starts=0,
            failed_joins=0 if has_grown else failures.failed_joins,
        )
        if job.record.ready is not None and job.record.ready.is_fast:
            job.update(device_class="")
        for number in job.generations.members & job.workers.keys():
            job.workers[number].advance(Phase.MEMBER)
        job.enter(Step.SETTLE)
        if job.generations.is_settling:
            job.enter(Step.RECOVER if job.generations.is_recovering else Step.RESCALE)
        elif len(order.placements) == job.target.workers:
            job.reach_target()
        job.note("allocation", order.reason, now=now, iteration=iteration, loss=order.loss)
        self._pool.changed(job)

    def give_order(self, job: Job) -> None:
        """Complete the newest allocation once all its workers can be reached.

        A job that was given no maximum starts with no more workers than it has shards, so its start waits for that.
        """
        allocation = job.generations.newest
        if allocation is None or not allocation.placements or allocation.generation in job.generations.orders:
            return
        if not job.generations.has_started and job.record.ready is None and job.record.spec.has_default_size:
            return
        addresses = [w.address if (w := job.workers.get(p.worker)) else None for p in allocation.placements]
        if not all(addresses):
            return
        if allocation.cold_start:
            self._bind(job)
            job.update(lineage=allocation.lineage)
        job.generations.order(
            [
                placement.model_copy(update={"address": address})
                for placement, address in zip(allocation.placements, addresses, strict=True)
            ]
        )
        self._pool.changed(job)

    def _bind(self, job: Job) -> None:
        """Record the class of device on which the job may train from now on: its bits are those of that class.

        A host that is lost may have trained and stored checkpoints that were never reported.
        """
        host = self._pool.hosts.get(job.generations.placements[0].host)
        if host and not job.record.device_class and job.keeps_state:
            job.update(device_class=host.record.device_class)
            job.generations.bind()

    def _write(
        self,
        job: Job,
        placements: Sequence[Placement],
        *,
        reason: str,
        cold_start: bool = False,
        is_recovery: bool = False,
        loss: Loss | None = None,
        change: Change = NO_CHANGE,
    ) -> None:
        """Write the next generation: ``placements``, with the iterations and the batch of ``change``."""
        generation = job.generations.newest.generation + 1 if job.generations.newest else 1
        job.generations.write(
            Allocation(
                job=job.id,
                epoch=self._epoch,
                generation=generation,
                placements=self._in_rank_order(placements),
                secret=self._secret_of(job.id, generation),
                lineage=job.record.lineage + 1 if cold_start else max(1, job.record.lineage),
                cold_start=cold_start,
                resume=cold_start and job.record.lineage > 0,
                checkpoint=_stored(job) if cold_start else None,
                is_recovery=is_recovery,
                not_before=change.not_before,
                until=change.until,
                batch_size=change.batch_size,
                gang=job.is_gang,
                reason=reason,
                loss=loss,
            )
        )
        self._pool.changed(job)

    def _in_rank_order(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        hosts = [placement.host for placement in placements]
        domains = {name: host.domain for name in {*hosts} if (host := self._pool.hosts.get(name))}
        return tuple(placements[number] for number in neighbors(hosts, domains))

    def _secret_of(self, job: str, generation: int) -> str:
        text = f"{job} {self._epoch} {generation}"
        return hmac.new(self._secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def _stored(job: Job) -> StoredCheckpoint | None:
    reported = job.record.checkpoint
    return StoredCheckpoint(lineage=reported.lineage, iteration=reported.iteration) if reported else None
