"""Host records and heartbeats: which hosts there are, and which workers run on them.

Agents repeat all they know with every heartbeat, so the order and number of messages does not matter:

- A worker's phase only rises.
- A generation becomes active when it is reported, or when heartbeats have named it for a while without a report.
- A worker that was listed in a heartbeat and is missing in a later one of the same incarnation is gone. How it ended is
  then not known, so agents list a worker that is gone as long as the newest allocation names it.
- Members of which only the slots are known, from the record of an earlier scheduler, are gone when all of their hosts
  are lost or have sent a heartbeat without them.
- A host of another version of Resile has left, even before the registry says so.
"""

from dataclasses import replace
from math import ceil

from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, WorkerExit, WorkerReport
from resile_shared.version import VERSION

from .allocator import Allocator
from .losses.fork_server_deaths import ForkServerDeaths
from .losses.worker_ends import WorkerEnds
from .slots.environment_requests import EnvironmentRequests
from .state.job import Job
from .state.pool import Host, Pool
from .state.slot_sets import SlotId
from .state.worker import Phase, Worker

_PHASES = {
    "starting": Phase.STARTING,
    "ready": Phase.READY,
    "member": Phase.MEMBER,
    "left": Phase.LEFT,
    "gone": Phase.GONE,
}


class HostEvents:
    """Handles what the registry stores of hosts, and what their agents report."""

    def __init__(
        self,
        pool: Pool,
        allocator: Allocator,
        ends: WorkerEnds,
        deaths: ForkServerDeaths,
        environments: EnvironmentRequests,
    ) -> None:
        self._pool = pool
        self._environments = environments
        self._deaths = deaths
        self._allocator = allocator
        self._ends = ends
        self._unreconciled: set[str] = set()
        """Jobs without a known member: only the slots of an earlier scheduler's active generation are known."""

    def on_record(self, record: HostRecord, *, now: float, is_live: bool = True) -> None:
        """Handle a change of a host; an older incarnation has no effect, nor has an older state."""
        if record.version != VERSION:
            record = record.model_copy(update={"state": HostState.LEFT})
        known = self._pool.hosts.get(record.host)
        if known and (record.incarnation < known.record.incarnation or record == known.record):
            return
        same = known if known and known.record.incarnation == record.incarnation else None
        if same and not same.is_alive:
            return
        is_gone = record.state in (HostState.LOST, HostState.LEFT)
        what = "joined" if record.state is HostState.UP else record.state.value
        self._pool.changed(None, f"{record.host} {what}")
        held = self._pool.held_on(record.host) if known and (is_gone or not same) else []
        self._pool.put_host(replace(same, record=record) if same else Host(record, is_heard=is_live))
        if known and not same:
            for job in self._pool.jobs.values():
                job.backoff.forget(record.host)
        how = record.state.value if is_gone else "lost"
        for job, worker in held:
            self._lose_with_host(job, worker, how, now)
        self._check_unreconciled(now)

    def drop_orphans(self, job: Job, *, now: float) -> None:
        """End the restored workers of a job whose hosts are gone."""
        if job.generations.unreconciled_slots and not job.generations.active:
            self._unreconciled.add(job.id)
        for worker in list(job.workers.values()):
            host = self._pool.hosts.get(worker.slot.host)
            if host is None or host.record.incarnation != worker.incarnation or not host.is_alive:
                self._lose_with_host(job, worker, "lost", now)

    def on_heartbeat(self, beat: Heartbeat, *, now: float) -> None:
        """Compare what a host runs with what is known of it."""
        host = self._pool.hosts.get(beat.host)
        if host is None or not host.is_alive:
            return
        if beat.incarnation != host.record.incarnation or beat.number <= host.beat:
            return
        is_first = host.beat < 0
        host.beat, host.num_waiting = beat.number, beat.num_waiting
        host.watched = None if beat.jobs is None else frozenset(beat.jobs)
        if not host.is_heard:
            self._pool.hear(host)
        self._deaths.on_heartbeat(host, beat, now=now)
        for report in beat.workers:
            self._on_listed(host, report, now)
        listed = {(report.job, report.worker) for report in beat.workers}
        for job, worker in self._pool.held_on(beat.host):
            if worker.was_seen and (job.id, worker.number) not in listed:
                self._lose(
                    job, worker, f"worker {worker.number} on {worker.slot.name} disappeared without a report", now
                )

        self._update_services(beat, now)
        self._environments.on_heartbeat(host, beat, is_first=is_first, now=now)
        self._check_unreconciled(now)

    def _update_services(self, beat: Heartbeat, now: float) -> None:
        """Find how many replicas the services need that have some on this host."""
        for name in dict.fromkeys(report.job for report in beat.workers if report.in_flight is not None):
            job = self._pool.jobs.get(name)
            service = job.record.spec.service if job else None
            if job is None or service is None or job.is_over:
                continue
            for report in beat.workers:
                if report.job == name and report.in_flight is not None and report.worker in job.workers:
                    job.load.see(report.worker, report.in_flight)
            alive = {number for number, worker in job.workers.items() if worker.phase < Phase.LEFT}
            if job.load.update(alive, per_replica=service.per_replica, now=now):
                num = ceil(job.load.in_flight)
                cause = f"{job.id} has {num} request{'' if num == 1 else 's'} in flight"
                self._pool.changed(job, cause)

    def _check_unreconciled(self, now: float) -> None:
        """Record for which jobs all members ended while no scheduler led."""
        for name in sorted(self._unreconciled):
            job = self._pool.jobs.get(name)
            slots = job.generations.unreconciled_slots if job else ()
            if job is not None and any(self._may_have_member(job, slot) for slot in slots):
                continue
            self._unreconciled.remove(name)
            if job is not None and slots:
                job.suspicions.record_vanished("all members")
                self._ends.check_members(job, now=now)
                self._pool.changed(job)

    def _may_have_member(self, job: Job, slot_name: str) -> bool:
        name, _, number = slot_name.rpartition("/")
        host = self._pool.hosts.get(name)
        if host is None or not host.is_alive:
            return False
        holder = self._pool.holders.get(SlotId(name, int(number)))
        is_held = holder is not None and holder[0] == job.id and job.workers[holder[1]].phase < Phase.GONE
        return is_held or not host.is_heard

    def _lose_with_host(self, job: Job, worker: Worker, how: str, now: float) -> None:
        worker.lose_host()
        self._lose(job, worker, f"{worker.slot.host} {how}", now)

    def _lose(self, job: Job, worker: Worker, reason: str, now: float) -> None:
        self._ends.on_gone(job, worker, WorkerExit(kind="abandoned", message=reason), now=now)

    def _on_listed(self, host: Host, report: WorkerReport, now: float) -> None:
        job = self._pool.jobs.get(report.job)
        if job is None:
            return
        worker = job.workers.get(report.worker) or self._adopt(host, job, report, now)
        if worker is None:
            return
        has_new_address = worker.see(report.address if report.state != "gone" else None)
        if job.generations.has_started:
            job.advance(report.iteration)
        if report.state == "gone":
            if report.generation:  # the report that it trains may come later
                self._pool.advance(job, worker, Phase.MEMBER)
            self._ends.on_gone(job, worker, report.exit or WorkerExit(kind="exited"), now=now)
            return
        self._pool.advance(job, worker, _PHASES[report.state])
        if has_new_address:
            self._allocator.give_order(job)
        if report.generation > job.record.generation and job.generations.has_been_reported(report.generation, now=now):
            self._allocator.activate(job, report.generation, iteration=report.iteration, now=now)

    def _adopt(self, host: Host, job: Job, report: WorkerReport, now: float) -> Worker | None:
        """Add a worker that an earlier scheduler dropped: it holds its slot until it is gone."""
        slot = SlotId(host.record.host, report.slot)
        if report.state == "gone" or slot in self._pool.holders or slot not in host.slots:
            return None
        worker = Worker(report.worker, slot, host.record.incarnation, now)
        self._pool.add_worker(job, worker)
        self._pool.changed(job)
        return worker
