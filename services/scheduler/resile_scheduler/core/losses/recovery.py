"""How a job continues when it loses members.

- The survivors continue: a recovering generation names them, preferably those that the newest membership names too.
  If there are none, leavers that have handed over and are not released yet continue, unless iterations were reported
  since. One generation answers all losses that are known by then. A newer one follows if a worker that it names is
  lost or has left before it is active.
- Without survivors, the job goes back to the queue and starts again from its newest checkpoint. If the newest
  generation moves the whole job, it may train already: the next heartbeats of its workers would say so.
- A job whose members have all ended without a result waits for the facts that the agents of its hosts still hold.
- One error of the script at one iteration is tolerated, if there are survivors; three failures of workers at one
  iteration fail the job. Lost hosts count for neither, nor do workers that were killed by SIGKILL.
"""

from collections.abc import Sequence

from resile_shared.messages.allocations import Loss
from resile_shared.messages.jobs import JobState

from ..allocator import Allocator
from ..gangs import Gangs
from ..job_ends import JobEnds
from ..state.job import Job
from ..state.pool import Pool
from ..state.worker import SCRIPT_ERRORS, Phase, Worker

MAX_FAILURES = 3
MAX_SCRIPT_ERRORS = 2
RESULT_SECONDS = 10.0


class Recovery:
    """Decides how jobs continue after losses."""

    def __init__(
        self, pool: Pool, allocator: Allocator, ends: JobEnds, gangs: Gangs, *, detection_seconds: float
    ) -> None:
        self._pool = pool
        self._allocator = allocator
        self._ends = ends
        self._gangs = gangs
        self._detection_seconds = detection_seconds

    def answer(self, job: Job, *, now: float) -> None:
        """Recover, restart or fail ``job`` if it has losses that are not answered yet."""
        if job.is_over or job.record.completed or not job.generations.has_started:
            return
        if not _calls_for_recovery(job):
            return
        lost = _lost(job)
        if job.is_gang:
            job.generations.mark_gone(now=now)  # `Gangs` decides, once the other failures are known
            return
        reasons = dict.fromkeys([*(worker.reason for worker in lost), job.suspicions.vanished])
        loss = _loss("; ".join(filter(None, reasons)) or "its members have left", lost)
        survivors = _survivors(job)
        if failure := self._count(job, lost, is_last=not survivors):
            self._ends.fail(job, failure, now=now)
        elif survivors:
            self._allocator.recover(job, survivors, loss=loss)
        elif not _may_have_moved(job):
            self._restart(job, loss, now=now)
        else:
            job.generations.mark_gone(now=now)

    def tick(self, job: Job, *, now: float) -> None:
        """Stop waiting for a report of a job without known members."""
        gone_since = job.generations.gone_since
        if gone_since is None or job.record.completed is not None:
            return
        if job.is_gang and (lost := _lost(job)):
            self._gangs.answer(job, lost, since=gone_since, now=now)
            return
        has_result = any(worker.has_finished for worker in job.workers.values())
        lost = _lost(job)
        if now - gone_since < (self._detection_seconds if lost and not has_result else RESULT_SECONDS):
            return
        hosts = [self._pool.hosts.get(name) for name in job.generations.possible_hosts]
        if any(host and host.is_alive and host.num_waiting for host in hosts):
            return
        if lost or job.suspicions.vanished:
            self._restart(job, _loss(lost[0].reason if lost else job.suspicions.vanished, lost[:1]), now=now)
        elif silenced := self._silenced(job):
            self._restart(job, Loss(reason=f"{silenced} was lost, perhaps with the result"), now=now)
        else:
            self._ends.fail(job, "every worker ended, but none reported a result", now=now)

    def _silenced(self, job: Job) -> str:
        """Return a host of members whose agent was lost, perhaps with what it had to report; empty: there is none."""
        for placement in job.generations.possible_members:
            host = self._pool.hosts.get(placement.host)
            if host is None or not host.is_alive or host.record.incarnation != placement.incarnation:
                return placement.host
        return ""

    def _count(self, job: Job, lost: list[Worker], *, is_last: bool) -> str:
        """Count the new failures; return why the job fails because of them, or an empty string."""
        known = job.record.failures
        failures = [w for w in lost if w.may_be_at_fault and w.number not in known.workers]
        errors = [worker for worker in failures if worker.failure in SCRIPT_ERRORS]
        is_further = job.iteration > known.iteration
        counted = job.count_failures(
            iteration=max(job.iteration, known.iteration),
            recoveries=bool(failures) + (0 if is_further else known.recoveries),
            script_errors=len(errors) + (0 if is_further else known.script_errors),
            workers=tuple(sorted({*known.workers, *(w.number for w in failures)} & job.workers.keys())),
        )
        if errors and (is_last or counted.script_errors >= MAX_SCRIPT_ERRORS):
            return errors[-1].reason
        if failures and counted.recoveries >= MAX_FAILURES:
            return f"three failures at one iteration: {failures[-1].reason}"
        return ""

    def _restart(self, job: Job, loss: Loss, *, now: float) -> None:
        """Start the job again from what is stored: no worker has its state."""
        if job.is_gang:
            self._gangs.end(job, loss, now=now)
            return
        checkpoint = job.record.checkpoint
        job.start_backoff.end(job.iteration, now=now)
        self._allocator.abandon(job, loss.reason)
        job.go_back(checkpoint.iteration if checkpoint else 0)
        job.release_slots()
        start = "from the newest complete checkpoint, or else from the beginning"
        if job.is_service:
            start = "with new replicas"
        elif checkpoint:
            start = f"from the checkpoint of iteration {checkpoint.iteration}"
        when = "when it is resumed, " if job.record.state is JobState.PAUSED else ""
        loss = Loss(reason=loss.reason, host=loss.host, restart=f"{when}{start}")
        reason = f"{loss.reason}: no worker is left, so it starts again {loss.restart}"
        job.note(job.record.state.value, reason, now=now, loss=loss)
        self._pool.changed(job)


def _calls_for_recovery(job: Job) -> bool:
    if job.generations.is_recovering:
        return not all(job.workers[placement.worker].is_sound for placement in job.generations.placements)
    return bool(job.suspicions.vanished or _lost(job))


def _lost(job: Job) -> list[Worker]:
    """Return the failed workers of the active generation, and of those that may be active by now.

    After a takeover, members that the newest generation does not name are known by their slots alone.
    """
    failed = [worker for worker in job.workers.values() if worker.has_failed]
    if not failed:
        return []
    members, slots = job.generations.members, job.generations.unreconciled_slots
    named = job.generations.named
    return [w for w in failed if w.number in members or w.slot.name in slots or (w.is_lost and w.number in named)]


def _loss(reason: str, lost: Sequence[Worker]) -> Loss:
    """Return the loss of workers, and of the first of their hosts that is lost."""
    return Loss(reason=reason, host=next((worker.slot.host for worker in lost if worker.is_host_lost), None))


def _survivors(job: Job) -> list[Worker]:
    """Return the workers that continue: those of the newest membership if there are any, else all that are left.

    Leavers are the last choice, since they lack what was trained after them.
    """
    named = job.generations.named
    sound = [worker for worker in job.workers.values() if worker.is_sound]
    members = [worker for worker in sound if worker.number in named]
    if not members and not _may_have_moved(job) and not _has_trained_since_switch(job):
        return sound
    return [worker for worker in members if job.generations.names(worker.number)] or members


def _has_trained_since_switch(job: Job) -> bool:
    """Whether the active generation is known to have committed an iteration."""
    checkpoint = job.record.checkpoint
    is_own = checkpoint is not None and checkpoint.lineage == job.record.lineage
    stored = checkpoint.iteration if checkpoint and is_own else 0
    return max(job.iteration, stored) > job.generations.active_since


def _may_have_moved(job: Job) -> bool:
    """Whether a worker may have the job's state, or may have completed it, without a report yet."""
    if any(worker.has_finished for worker in job.workers.values()):
        return True
    ordered = {placement.worker for order in job.generations.orders.values() for placement in order.placements}
    return not job.generations.is_recovering and any(
        worker.phase < Phase.LEFT and not worker.has_failed and worker.number in ordered
        for worker in job.workers.values()
    )
