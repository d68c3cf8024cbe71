"""What happens because time has passed.

- Backoffs and pauses before another start end.
- Joiners that do not join are withdrawn. A cold start whose members are not ready, or do not form their generation, is
  given up; what is bounded is the time to the training call, and the time from there to the first round.
- The workers of hosts that drain are ended at the deadline.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from resile_shared.messages.hosts import HostRecord, HostState, WorkerExit
from resile_shared.messages.message import at

from ..state.job import Job
from ..state.pool import Pool
from ..state.worker import Phase, Worker
from .recovery import Recovery
from .worker_ends import WorkerEnds

JOIN_SECONDS = 600.0
LINK_DETECTIONS = 10
"""Joiners that are ready may take this many times ``detection_seconds`` to connect to all members."""
LINK_ITERATIONS = 2
MOST_ADDRESSES = 3
"""A reason names the addresses of at most this many other hosts."""
LOAD_BYTES_PER_SECOND = 10_000_000
"""A cold start times out if its checkpoint is loaded more slowly than this."""


@dataclass(frozen=True)
class LinkWait:
    """Since when all workers that are to join ``generation`` are ready, and the iteration at that time."""

    generation: int
    since: float
    iteration: int


class Deadlines:
    """Checks the deadlines of all jobs and hosts."""

    def __init__(self, pool: Pool, recovery: Recovery, ends: WorkerEnds, *, detection_seconds: float) -> None:
        self._pool = pool
        self._recovery = recovery
        self._ends = ends
        self._link_seconds = LINK_DETECTIONS * detection_seconds
        self._link_waits: dict[str, LinkWait] = {}

    def check(self, *, now: float) -> None:
        """Handle all deadlines that have passed."""
        for job in self._pool.jobs.values():
            if job.is_over:
                self._link_waits.pop(job.id, None)
                continue
            for host in job.backoff.expire(now=now):
                job.explain_change(f"{host} is tried again")
                self._pool.changed(job)
            if job.start_backoff.expire(now=now) or job.growth_limit.expire(now=now):
                self._pool.changed(job)
            self._recovery.tick(job, now=now)
            if job.generations.is_settling and job.generations.has_started:
                self._withdraw_late(job, now)
                self._withdraw_unlinked(job, now)
            elif job.generations.has_started:
                self._link_waits.pop(job.id, None)
            elif job.generations.placements:
                self._give_up_start(job, now)
        for known in self._pool.hosts.values():
            self._evict(known.record, now)

    def _evict(self, host: HostRecord, now: float) -> None:
        """End the workers that a draining host still has at its deadline; their jobs recover without them."""
        if host.state is not HostState.DRAINING or host.drain_deadline is None or host.drain_deadline > at(now):
            return
        for job, worker in self._pool.held_on(host.host):
            if worker.phase is not Phase.GONE and not worker.is_fenced:
                worker.fence()
                worker.evict(f"{host.host} reached its drain deadline")
                self._pool.changed(job)

    def _withdraw(self, job: Job, worker: Worker, why: str, now: float) -> None:
        text = f"worker {worker.number} on {worker.slot.name} is {why}"
        self._ends.on_failed(job, worker, WorkerExit(kind="abandoned", message=text), now=now)

    def _withdraw_late(self, job: Job, now: float) -> None:
        """Withdraw joiners that are not ready by their deadline."""
        for worker in list(job.workers.values()):
            is_late = worker.phase < Phase.READY and now - worker.named_at >= JOIN_SECONDS
            if is_late and worker.number in job.joiners and job.generations.names(worker.number):
                self._withdraw(job, worker, f"not ready after {JOIN_SECONDS:g} seconds", now)

    def _withdraw_unlinked(self, job: Job, now: float) -> None:
        """Withdraw joiners that are ready but do not join although training goes on, those of one host at a time.

        Which of them lacks links is not known, so the host that was tried first is withdrawn first; it is tried again
        last.
        """
        joiners = [job.workers[number] for number in sorted(job.joiners)]
        is_due = job.generations.is_settling and not job.generations.is_recovering
        wait = self._link_wait(job, joiners if is_due else [], now)
        if now - wait.since < self._link_seconds or job.iteration - wait.iteration < LINK_ITERATIONS:
            return
        for worker in [joiner for joiner in joiners if joiner.slot.host == joiners[0].slot.host]:
            why = f"ready, but had no links to all members after {self._link_seconds:g} seconds"
            self._withdraw(job, worker, f"{why}{_where(job, worker)}", now)

    def _give_up_start(self, job: Job, now: float) -> None:
        """Give up a cold start that takes too long, and name the member that is most likely the cause."""
        members = [job.workers[number] for number in sorted(job.held)]
        late = [w for w in members if w.phase < Phase.READY and now - w.named_at >= JOIN_SECONDS]
        if late:
            self._ends.on_start_late(job, late[0], f"not ready after {JOIN_SECONDS:g} seconds", now=now)
            return
        seconds = self._link_seconds + self._load_seconds(job)
        if job.suspicions.have_lasted(self._link_seconds):
            why = f"cut off: the workers lost their links to each other {self._link_seconds:g} seconds ago"
            self._end_unlinked(job, members, why, now)
        elif now - self._link_wait(job, members, now).since >= seconds:
            why = f"ready, but the workers had no links to each other after {seconds:g} seconds"
            self._end_unlinked(job, members, why, now)

    def _end_unlinked(self, job: Job, members: Sequence[Worker], why: str, now: float) -> None:
        accused = _most_accused(job, members)
        self._ends.on_start_unlinked(job, accused, f"{why}{_where(job, accused)}", now=now)

    def _load_seconds(self, job: Job) -> float:
        """Return how long the members may take to load a checkpoint, which they do before their first round."""
        checkpoint = job.record.checkpoint
        if checkpoint is None and not job.record.generation:
            return 0.0  # it has never trained
        return JOIN_SECONDS + (checkpoint.num_bytes / LOAD_BYTES_PER_SECOND if checkpoint else 0.0)

    def _link_wait(self, job: Job, workers: Sequence[Worker], now: float) -> LinkWait:
        """Return since when ``workers`` have all been ready to form the newest generation; now if they are not."""
        newest = job.generations.newest
        generation = newest.generation if newest else 0
        wait = self._link_waits.get(job.id)
        is_ordered = newest is not None and newest.has_addresses
        if not is_ordered or not workers or any(worker.phase < Phase.READY for worker in workers):
            self._link_waits.pop(job.id, None)
            return LinkWait(generation, since=now, iteration=job.iteration)
        if wait is None or wait.generation != generation:
            wait = self._link_waits[job.id] = LinkWait(generation, since=now, iteration=job.iteration)
        return wait


def _most_accused(job: Job, members: Sequence[Worker]) -> Worker:
    """Return the member that most others accuse; of equals, the one that accuses most, and then the first."""
    accusers = Counter(accuser for accuser, _ in job.suspicions.pairs)
    suspects = Counter(suspect for _, suspect in job.suspicions.pairs)
    return max(members, key=lambda member: (suspects[member.number], accusers[member.number]))


def _where(job: Job, worker: Worker) -> str:
    """Say where ``worker`` and the others are, and what to do; empty: all are at one address."""
    others = (job.workers.get(placement.worker) for placement in job.generations.placements)
    addresses = dict.fromkeys(other.address.host for other in others if other and other.address)
    own = worker.address.host if worker.address else ""
    addresses.pop(own, None)
    if not own or not addresses:
        return ""
    some = ", ".join([*addresses][:MOST_ADDRESSES])
    return f": it is at {own}, others at {some}; hosts must reach each other on any port (`resile host --address`)"
