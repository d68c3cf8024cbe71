"""Which hosts build the environments of which jobs, before the jobs get slots there.

A job that requires packages gets slots only on hosts that have reported its environment as ready. These rules decide
which hosts are asked for it:

- At first one host is. It stores the versions that the others install, and what cannot be built fails once: the job
  then fails before it has had a slot, unless another host may succeed.
- Once that host is ready, as many more are asked as the minimum of the job needs. While the policy gives it all the
  slots of its ready hosts, or only other hosts have free slots, as many hosts again are asked, step by step.
- A host that fails is avoided for a while (`backoff.py`), and asked again afterwards.

Nothing of this is stored: heartbeats repeat it. That a host is ready is a hint; a worker that starts there nevertheless
builds what is missing.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from resile_shared.messages.hosts import EnvironmentReport, Heartbeat

from ..job_ends import JobEnds
from ..state.job import Job
from ..state.pool import Host, Pool
from .host_groups import HostGroup, HostGroups
from .job_view import JobView

MAX_ENVIRONMENTS = 10
"""How many different environments one host builds and keeps for jobs that have no workers there."""


class EnvironmentRequests:
    """Asks hosts for the environments of jobs, and handles what they report."""

    def __init__(self, pool: Pool, ends: JobEnds) -> None:
        self._pool = pool
        self._ends = ends
        self._jobs: dict[str, dict[str, None]] = {}
        """The hosts that are asked for the environment of each job, in order."""
        self._hosts: dict[str, set[str]] = {}
        """The jobs whose environments each host is asked for."""
        self._failures: dict[str, str] = {}
        """Why the newest build of a job failed on a host that may be at fault."""

    def on_heartbeat(self, host: Host, beat: Heartbeat, *, is_first: bool, now: float) -> None:
        """Handle what a host reports of environments."""
        if beat.environments is None:
            self._pool.unreporting.add(host.record.host)
            if is_first and self._jobs:
                self._pool.hosts_version += 1
                self._pool.changed(None)
            return
        before = host.environments or {}
        host.prepares = tuple(report.job for report in beat.environments)
        host.environments = {report.job: report for report in beat.environments}
        for name in {**before, **host.environments}:
            job, report = self._pool.jobs.get(name), host.environments.get(name)
            if job is None or job.is_over or report == before.get(name):
                continue
            if report is not None and report.state == "ready":
                self._pool.prepared.setdefault(name, set()).add(host.record.host)
            if report is not None and report.state == "failed":
                self._on_failed(host.record.host, job, report, now=now)
            self._pool.changed(job)

    def _on_failed(self, host: str, job: Job, report: EnvironmentReport, *, now: float) -> None:
        has_run = job.generations.has_started or bool(job.generations.placements)
        if report.is_hosts_fault or has_run or any(self._is_ready(each, job.id) for each in self._jobs.get(job.id, ())):
            self._failures[job.id] = f"{host}: {report.reason}"
            job.backoff.add(host, now=now)
        else:
            self._ends.fail(job, report.reason, now=now)

    def of_host(self, host: Host) -> tuple[str, ...]:
        """Return the jobs whose environments ``host`` must have: first those with workers there, then as they queue."""
        named = self._hosts.get(host.record.host)
        if not named or host.environments is None:
            return ()
        held = {job.id for job, _ in self._pool.held_on(host.record.host)}
        jobs = [self._pool.jobs[name] for name in named]
        chosen: list[str] = []
        different: set[tuple[str, ...]] = set()
        for job in sorted(jobs, key=lambda job: (job.id not in held, -job.record.priority, job.number)):
            requirements = job.record.spec.requirements
            if job.id in held or requirements in different or len(different) < MAX_ENVIRONMENTS:
                chosen.append(job.id)
                different.add(requirements)
        return tuple(chosen)

    def request(self, view: JobView, groups: HostGroups) -> None:
        """Decide which hosts must have the environment of a job that requires packages."""
        job = view.job
        fitting = groups.fitting(view.device_class, job.record.spec.group)
        asked: list[str] = []
        if job.is_training:
            held = dict.fromkeys(slot.host for slot in view.held)
            possible = fitting.hosts - view.avoided
            before = [
                host for host in self._jobs.get(job.id, ()) if host in possible and not self._has_failed(host, job.id)
            ]
            asked = list({**held, **dict.fromkeys(before)})
            asked += self._others(view, asked, possible.difference(asked))
        self._ask(job.id, asked)

    def forget(self, job: str) -> None:
        """Record that no host needs the environment of ``job`` any more."""
        self._ask(job, ())
        for known in (self._jobs, self._failures, self._pool.prepared):
            known.pop(job, None)

    def _ask(self, job: str, asked: Sequence[str]) -> None:
        before = self._jobs.get(job, {})
        for host in set(before).symmetric_difference(asked):
            jobs = self._hosts.setdefault(host, set())
            (jobs.add if host in asked else jobs.discard)(job)
            if not jobs:
                del self._hosts[host]
            self._pool.touch_host(host)
        self._jobs[job] = dict.fromkeys(asked)

    def _others(self, view: JobView, asked: Sequence[str], others: Collection[str]) -> list[str]:
        """Return the hosts that are asked in addition to ``asked``."""
        hosts, job = self._pool.hosts, view.job
        ready = [host for host in asked if self._is_ready(host, job.id)]
        if not ready or not others:
            return [] if asked else self._best(job, others)[:1]
        slots = sum(len(hosts[host].slots) for host in asked)
        workers = view.target.workers if view.target else 0
        if slots < job.least_workers:
            in_order = self._best(job, others)
            sums = accumulate((len(hosts[host].slots) for host in in_order), initial=slots)
            return in_order[: sum(before < job.least_workers for before in sums)]
        if len(ready) < len(asked):
            return []
        if len(job.held) < workers:
            return self._best(job, self._pool.free_slots().keys() & others)[: len(ready)]
        if slots <= workers < view.limit:
            return self._best(job, others)[: len(ready)]
        return []

    def _best(self, job: Job, hosts: Iterable[str]) -> list[str]:
        """Return ``hosts``, first those where the job is likely to start soonest, without those that failed last."""
        free = self._pool.free_slots()

        def key(name: str) -> tuple[bool, int, int, int, str]:
            host = self._pool.hosts[name]
            num_asked = len(self._hosts.get(name, ()))
            return not self._has_same(host, job), -len(free.get(name, ())), num_asked, -len(host.slots), name

        return sorted((host for host in hosts if not self._has_failed(host, job.id)), key=key)

    def _has_same(self, host: Host, job: Job) -> bool:
        """Whether an environment with the same requirements is ready on ``host``."""
        others = (self._pool.jobs.get(name) for name in host.environments or () if host.has_environment(name))
        return any(other and other.record.spec.requirements == job.record.spec.requirements for other in others)

    def _is_ready(self, host: str, job: str) -> bool:
        known = self._pool.hosts.get(host)
        return known is not None and known.has_environment(job)

    def _has_failed(self, host: str, job: str) -> bool:
        known = self._pool.hosts.get(host)
        report = known.environments.get(job) if known and known.environments else None
        return report is not None and report.state == "failed"

    def reason(self, view: JobView, fitting: HostGroup) -> str:
        """Return what a job is waiting for if it fits on the hosts, but too few of them have its environment."""
        job = view.job
        if not job.record.spec.requirements or view.demand.least <= view.demand.most:
            return ""
        if fitting.num_slots < view.demand.least:
            return ""
        pending = [host for host in self._jobs.get(job.id, ()) if not self._is_ready(host, job.id)]
        if pending:
            return _progress(self._pool.hosts[pending[0]], job.id)
        if failure := self._failures.get(job.id):
            return f"waiting a while: {failure}"
        return f"the environment of {job.id} is about to be built"


def _progress(host: Host, job: str) -> str:
    name, reports = host.record.host, host.environments or {}
    report = reports.get(job)
    other = next((each.job for each in reports.values() if each.state == "building"), "")
    if other and other != job:
        return f"{name} builds the environment of {other} first"
    if report is None:
        return f"{name} is about to build the environment of {job}"
    return f"{name} is building the environment of {job}"
