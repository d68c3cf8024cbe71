"""What agents and workers tell, and what becomes of it.

Agents repeat all they know with every heartbeat; single reports are faster and say more. Either may be late, doubled or
lost, so both lead to the same few steps here, and each of these has its effect once:

- A worker's phase only rises.
- A generation comes into force when it is reported, or when heartbeats have named it for a while and no report came.
- A worker that was seen in a heartbeat and is not in a later one of the same incarnation is gone. How it ended is then
  not known, so agents keep a worker that is gone in their heartbeats as long as the newest allocation names it.
- A worker that ends badly withdraws itself while it is a joiner, restarts the founding while that is not its script's
  fault, and is lost while it is a member (`recovery.py`). Once no generation names it any more its end means nothing.
"""

from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, WorkerExit, WorkerReport
from resile_shared.messages.message import at
from resile_shared.messages.reports import (
    CheckpointSaved,
    Completed,
    Failed,
    Left,
    PeerSuspected,
    Progress,
    Ready,
    Report,
    Switched,
    Warned,
)

from .events import Tick
from .generations import Generations
from .job_commands import JobCommands
from .lifecycle import Step
from .placement import SlotId
from .recovery import MAX_FAILURES, MAX_FAULTS, SCRIPT_FAULTS, Recovery
from .state import Host, Intent, Job, LinkWait, Phase, Pool, Worker
from .suspicions import SuspicionTracker

REPORT_SECONDS = 2.0
JOIN_SECONDS = 600.0
LINK_DETECTIONS = 10
"""For how many times ``detection_seconds`` joiners that are ready may take to get their links to all members."""
LINK_ITERATIONS = 2
MAX_STARTS = 3
MAX_WARNINGS = 20
"""In the history of one job."""

_PHASES = {
    "starting": Phase.STARTING,
    "ready": Phase.READY,
    "member": Phase.MEMBER,
    "left": Phase.LEFT,
    "gone": Phase.GONE,
}
_OWN_FAULTS = (*SCRIPT_FAULTS, "out of memory")


class Workers:
    """Takes in what is told of hosts and workers."""

    def __init__(
        self,
        pool: Pool,
        generations: Generations,
        job_commands: JobCommands,
        recovery: Recovery,
        suspicions: SuspicionTracker,
        *,
        detection_seconds: float,
    ) -> None:
        self._pool = pool
        self._generations = generations
        self._job_commands = job_commands
        self._recovery = recovery
        self._suspicions = suspicions
        self._link_seconds = LINK_DETECTIONS * detection_seconds

    def handle(self, event: HostRecord | Heartbeat | Report | Tick, *, now: float) -> None:
        """Take ``event`` in."""
        match event:
            case HostRecord():
                self.host_changed(event, now=now)
            case Heartbeat():
                self._beat(event, now)
            case Report():
                self._report(event, now)
            case Tick():
                self._tick(now)

    # hosts

    def host_changed(self, record: HostRecord, *, now: float, is_live: bool = True) -> None:
        """Take in what the registry says of a host; an older incarnation has no effect, nor has an older state."""
        known = self._pool.hosts.get(record.host)
        if known and (record.incarnation < known.record.incarnation or record == known.record):
            return
        is_same = known is not None and known.record.incarnation == record.incarnation
        if known and is_same and not known.is_alive:
            return
        is_gone = record.state in (HostState.LOST, HostState.LEFT)
        what = "joined" if record.state is HostState.UP else record.state.value
        self._pool.changed(f"{record.host} {what}")
        held = self._pool.held_on(record.host) if known and (is_gone or not is_same) else []
        self._pool.hosts[record.host] = Host(
            record,
            is_heard=known.is_heard if known and is_same else is_live,
            beat=known.beat if known and is_same else -1,
        )
        if known and not is_same:
            for job in self._pool.jobs.values():
                job.backoffs.pop(record.host, None)
        how = record.state.value if is_gone else "lost"
        for job, worker in held:
            self._gone(job, worker, WorkerExit(kind="abandoned", message=f"{record.host} {how}"), now)

    def compare(self, job: Job, *, now: float) -> None:
        """Compare what is stored of a job with what is stored of its hosts."""
        for worker in list(job.workers.values()):
            host = self._pool.hosts.get(worker.slot.host)
            is_there = host is not None and host.record.incarnation == worker.incarnation
            if host is None or not is_there or not host.is_alive:
                how = WorkerExit(kind="abandoned", message=f"{worker.slot.host} lost")
                self._gone(job, worker, how, now)

    def _beat(self, beat: Heartbeat, now: float) -> None:
        """Compare what a host runs with what is known of it."""
        host = self._pool.hosts.get(beat.host)
        if host is None or not host.is_alive:
            return
        if beat.incarnation != host.record.incarnation or beat.number <= host.beat:
            return
        host.beat = beat.number
        if not host.is_heard:
            host.is_heard = True
            self._pool.changed()
        for report in beat.workers:
            self._seen(host, report, now)
        listed = {(report.job, report.worker) for report in beat.workers}
        for job, worker in self._pool.held_on(beat.host):
            if worker.was_seen and (job.id, worker.number) not in listed:
                text = f"worker {worker.number} on {worker.slot.name} is gone without a word"
                self._gone(job, worker, WorkerExit(kind="abandoned", message=text), now)

    def _seen(self, host: Host, report: WorkerReport, now: float) -> None:
        job = self._pool.jobs.get(report.job)
        if job is None:
            return
        worker = job.workers.get(report.worker) or self._adopt(host, job, report, now)
        if worker is None:
            return
        worker.was_seen = True
        if job.has_started:
            job.iteration = max(job.iteration, report.iteration)
        if report.state == "gone":
            self._gone(job, worker, report.exit or WorkerExit(kind="exited"), now)
            return
        self._has_come(job, worker, _PHASES[report.state])
        if report.address and worker.address is None:
            worker.address = report.address
            self._generations.give_order(job)
        if report.generation > job.record.generation:
            self._named(job, report, now)

    def _has_come(self, job: Job, worker: Worker, phase: Phase) -> None:
        if phase is Phase.LEFT and worker.phase < phase and job.is_recovering:
            self._pool.changed()
        worker.phase = max(worker.phase, phase)

    def _adopt(self, host: Host, job: Job, report: WorkerReport, now: float) -> Worker | None:
        """Take in a worker that an earlier scheduler dropped: it holds its slot until it is gone."""
        slot = SlotId(host.record.host, report.slot)
        if report.state == "gone" or slot in self._pool.holders or slot not in host.slots:
            return None
        worker = Worker(report.worker, slot, host.record.incarnation, now)
        self._pool.add_worker(job, worker)
        self._pool.changed()
        return worker

    def _named(self, job: Job, report: WorkerReport, now: float) -> None:
        """A generation trains that nobody reported; the report, which is exact, gets some time to come."""
        generation, since = job.reported_generation
        if generation != report.generation:
            job.reported_generation = (report.generation, now)
        elif now - since >= REPORT_SECONDS:
            self._in_force(job, report.generation, report.iteration, now)

    # reports

    def _report(self, report: Report, now: float) -> None:
        """Take in what a worker said."""
        job = self._pool.jobs.get(report.job)
        if job is None or job.is_over:
            return
        match report.content:
            case Switched(iteration=iteration):
                self._in_force(job, report.generation, iteration, now)
            case CheckpointSaved() as checkpoint:
                self._saved(job, report, checkpoint, now)
            case Completed() as completed:
                self._completed(job, report, completed, now)
            case Progress(iteration=iteration) if job.has_started and self._is_of_this_lineage(job, report):
                job.iteration = max(job.iteration, iteration)
            case PeerSuspected() as lost if self._is_of_this_lineage(job, report):
                self._suspicions.accuse(job, report, lost, now=now)
            case _:
                if worker := job.workers.get(report.worker):
                    self._said(job, worker, report, now)

    def _warned(self, job: Job, message: str, now: float) -> None:
        """Keep in the history what the user should know; once, though several workers say it."""
        told = [item.reason for item in job.record.history if item.kind == "warning"]
        if message not in told and len(told) < MAX_WARNINGS:
            job.note("warning", message, now=now)

    def _said(self, job: Job, worker: Worker, report: Report, now: float) -> None:
        """Take in what a worker said of itself."""
        match report.content:
            case Ready() as ready:
                self._ready(job, worker, ready, now)
            case Left():
                self._has_come(job, worker, Phase.LEFT)
            case Warned(message=message):
                self._warned(job, message, now)
            case Failed(message=message, details=details):
                self._failed(job, worker, WorkerExit(kind="failed", message=message, details=details), now)

    def _ready(self, job: Job, worker: Worker, ready: Ready, now: float) -> None:
        """A script has reached its training call: what it asks for must be what the others asked for."""
        self._has_come(job, worker, Phase.READY)
        if job.record.ready is None:
            job.update(ready=ready)
            job.first_ready = worker.number
            self._pool.changed(f"{job.id} can use {ready.num_shards} workers", by=job.id)
        elif difference := _difference(job.record.ready, ready):
            others = "the others" if job.first_ready is None else f"worker {job.first_ready}"
            text = (
                f"it disagrees with {others} on {difference}: the script must make the same training call in every "
                "worker"
            )
            self._failed(job, worker, WorkerExit(kind="failed", message=text), now)

    def _in_force(self, job: Job, generation: int, iteration: int, now: float) -> None:
        """A generation took effect: whoever it does not name has trained its last iteration."""
        if generation <= job.record.generation or generation not in job.orders:
            return
        order = job.orders[generation]
        has_grown = len(order.placements) > len(job.active)
        job.active, job.unreconciled_slots = order.placements, frozenset()
        job.active_since, job.active_until = iteration, order.until
        job.orders = {number: newer for number, newer in job.orders.items() if number >= generation}
        job.iteration = iteration if order.cold_start else max(job.iteration, iteration)
        job.ended_at = None
        job.accusations.clear()
        before = job.record.failures
        reached = max(before.iteration, iteration) if order.is_recovery else before.iteration
        failures = before.model_copy(update={"iteration": reached, "failed_starts": 0})
        if has_grown:
            failures = failures.model_copy(update={"failed_joins": 0})
        job.update(generation=generation, failures=failures)
        for placement in job.active:
            if worker := job.workers.get(placement.worker):
                worker.phase = max(worker.phase, Phase.MEMBER)
        job.enter(Step.SETTLE)
        if job.is_settling:
            job.enter(Step.RECOVER if job.is_recovering else Step.RESCALE)
        job.note("allocation", order.reason, now=now, iteration=iteration)
        self._pool.changed()

    def _is_of_this_lineage(self, job: Job, report: Report) -> bool:
        """Whether the report comes from the generation in force, or from one that may be by now."""
        return report.generation == job.record.generation or report.generation in job.orders

    def _saved(self, job: Job, report: Report, checkpoint: CheckpointSaved, now: float) -> None:
        if not self._is_of_this_lineage(job, report):
            return
        if job.record.checkpoint is None or checkpoint.iteration > job.record.checkpoint.iteration:
            job.update(checkpoint=checkpoint)
        if checkpoint.pausing and job.intent is not Intent.TRAIN and job.has_started:
            job.iteration = checkpoint.iteration
            self._job_commands.give_up_slots(job, now=now)

    def _completed(self, job: Job, report: Report, completed: Completed, now: float) -> None:
        """Training is complete; the job is, when its members' scripts have come to their ends."""
        if job.record.completed or not (job.has_started or report.generation in job.orders):
            return
        if not self._is_of_this_lineage(job, report):
            return
        self._in_force(job, report.generation, completed.iteration, now)
        job.iteration = completed.iteration
        job.update(completed=completed)
        self._pool.changed(f"{job.id} completed", by=job.id)
        self._ended(job, now)

    # ends

    def _gone(self, job: Job, worker: Worker, how: WorkerExit, now: float) -> None:
        """A worker's process has ended, or its host has."""
        if worker.phase is Phase.GONE:
            return
        was_member = worker.phase is Phase.MEMBER
        worker.phase = Phase.GONE
        self._pool.changed()
        if job.is_over:
            return
        worker.has_finished = how.kind == "finished"
        is_expected = how.kind in ("finished", "left") or (job.record.completed and how.kind in ("abandoned", "killed"))
        if not is_expected:
            self._failed(job, worker, how, now, was_member=was_member)
        if not job.is_over:
            self._ended(job, now)

    def _ended(self, job: Job, now: float) -> None:
        """Look whether all who count are gone."""
        counted = {p.worker for p in (job.active if job.record.completed else (*job.active, *job.placements))}
        alive = [number for number in counted if (w := job.workers.get(number)) and w.phase < Phase.GONE]
        if alive or not counted:
            return
        if job.record.completed is None:
            job.ended_at = job.ended_at or now
            return
        self._generations.abandon(job, "completed")
        job.enter(Step.COMPLETE)
        job.note("completed", "", now=now)
        self._pool.changed(f"{job.id} completed")

    def _failed(self, job: Job, worker: Worker, how: WorkerExit, now: float, *, was_member: bool = False) -> None:
        """A worker cannot go on, by its own word or by its agent's."""
        is_counted = any(placement.worker == worker.number for placement in job.active)
        if worker.has_failed or worker.is_fenced or job.is_over or not (is_counted or worker.number in job.named):
            return
        worker.failure, worker.status = how.kind, how.status
        worker.reason = how.describe(f"worker {worker.number} on {worker.slot.name}")
        if is_counted or was_member or worker.phase is Phase.MEMBER:
            self._lost_member(job, worker, now)
        elif job.names(worker.number) and job.has_started:
            self._withdraw(job, worker, now)
        elif job.names(worker.number):
            self._failed_to_start(job, worker, now)

    def _failed_to_start(self, job: Job, worker: Worker, now: float) -> None:
        """A founder ended before its job was founded."""
        failures = job.record.failures
        failed_starts = failures.failed_starts + worker.may_be_at_fault
        job.update(failures=failures.model_copy(update={"failed_starts": failed_starts}))
        if worker.failure in _OWN_FAULTS or failed_starts >= MAX_STARTS:
            self._recovery.fail(job, worker.reason, now=now)
        else:
            job.back_off(worker.slot.host, now=now)
            self._generations.cancel_start(job)
            job.note("queued", f"its start was given up: {worker.reason}", now=now)

    def _lost_member(self, job: Job, worker: Worker, now: float) -> None:
        """A member is lost: all that are at this moment are answered together, when it is decided."""
        if job.record.completed:
            self._recovery.fail(job, worker.reason, now=now)
            return
        worker.is_lost = True
        if job.is_cold_starting and job.allocation is not None:
            self._in_force(job, job.allocation.generation, job.iteration, now)
        if worker.failure in _OWN_FAULTS:
            job.back_off(worker.slot.host, now=now)
        self._pool.changed()

    def _withdraw(self, job: Job, worker: Worker, now: float) -> None:
        """A joiner failed. A job that cannot do with fewer fails when that happens again and again."""
        failures = job.record.failures
        failed_joins = failures.failed_joins + worker.may_be_at_fault
        job.update(failures=failures.model_copy(update={"failed_joins": failed_joins}))
        if job.is_exact and failed_joins >= (MAX_FAULTS if worker.failure in _OWN_FAULTS else MAX_FAILURES):
            self._recovery.fail(job, worker.reason, now=now)
            return
        job.back_off(worker.slot.host, now=now)
        job.change_reason = f"withdrawn: {worker.reason}"
        self._pool.changed()

    # time

    def _tick(self, now: float) -> None:
        """Look at the deadlines of all jobs."""
        for job in self._pool.jobs.values():
            if job.is_over:
                continue
            for name, back_off in job.backoffs.items():
                if back_off.until <= now and back_off.until != 0.0:
                    back_off.until = 0.0
                    job.change_reason = f"{name} is tried again"
                    self._pool.changed()
            self._recovery.tick(job, now=now)
            if job.has_started:
                self._late(job, now)
                self._unlinked(job, now)
        for host in self._pool.hosts.values():
            self._evict(host.record, now)

    def _evict(self, host: HostRecord, now: float) -> None:
        """End the workers that a draining host still has at its deadline; their jobs recover without them."""
        if host.state is not HostState.DRAINING or host.drain_deadline is None or host.drain_deadline > at(now):
            return
        for _, worker in self._pool.held_on(host.host):
            if worker.phase is Phase.GONE or worker.is_fenced:
                continue
            worker.is_fenced = True
            if not worker.has_failed:
                worker.failure, worker.is_lost = "abandoned", True
                worker.reason = f"{host.host} reached its drain deadline"
            self._pool.changed()

    def _late(self, job: Job, now: float) -> None:
        """Withdraw joiners that are not ready by their deadline."""
        for worker in list(job.workers.values()):
            is_late = worker.phase < Phase.READY and now - worker.named_at >= JOIN_SECONDS
            if is_late and worker.number in job.joiners and job.names(worker.number):
                text = f"worker {worker.number} on {worker.slot.name} is not ready after {JOIN_SECONDS:g} seconds"
                how = WorkerExit(kind="abandoned", message=text)
                self._failed(job, worker, how, now)

    def _unlinked(self, job: Job, now: float) -> None:
        """Withdraw joiners that are ready and do not come to train though training goes on: of one host at a time.

        Who holds the others up is not known, so the host that was tried first goes first: it comes back as the last.
        """
        allocation = job.allocation
        joiners = [job.workers[number] for number in sorted(job.joiners)]
        is_due = joiners and allocation and job.is_settling and not job.is_recovering and allocation.has_addresses
        if not allocation or not is_due or any(joiner.phase < Phase.READY for joiner in joiners):
            job.link_wait = None
            return
        if job.link_wait is None or job.link_wait.generation != allocation.generation:
            job.link_wait = LinkWait(allocation.generation, since=now, iteration=job.iteration)
        time_is_over = now - job.link_wait.since >= self._link_seconds
        if not time_is_over or job.iteration - job.link_wait.iteration < LINK_ITERATIONS:
            return
        for worker in [joiner for joiner in joiners if joiner.slot.host == joiners[0].slot.host]:
            text = (
                f"worker {worker.number} on {worker.slot.name} is ready, but had no links to all members "
                f"after {self._link_seconds:g} seconds"
            )
            self._failed(job, worker, WorkerExit(kind="abandoned", message=text), now)


def _difference(one: Ready, other: Ready) -> str:
    """Name the first thing that two training calls disagree on; empty if there is none."""
    for name in ("iterations_total", "num_shards", "batch_size", "epochs", "samples"):
        if (left := getattr(one, name)) != (right := getattr(other, name)):
            return f"{name.replace('_', ' ')} ({right} instead of {left})"
    return ""
