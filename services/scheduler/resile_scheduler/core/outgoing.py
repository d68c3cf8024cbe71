"""Which commands follow from the state: what to store, which host has which jobs, which workers to stop or pause."""

from collections.abc import Iterable

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Heartbeat
from resile_shared.messages.jobs import Intent, JobRecord

from .events import AssignJobs, Event, PauseWorkers, StateRestored, StopWorkers, StoreJob, WriteAllocation
from .slots.environment_requests import EnvironmentRequests
from .state.job import Job
from .state.pool import Host, Pool
from .state.worker import Worker

PAUSE_AGAIN_SECONDS = 5.0


class Outgoing:
    """Compares the state with what was commanded before."""

    def __init__(self, pool: Pool, environments: EnvironmentRequests) -> None:
        self._pool = pool
        self._environments = environments
        self._stored: dict[str, JobRecord] = {}
        self._written: dict[str, Allocation] = {}
        self._paused_at: dict[str, float] = {}

    def restore(self, event: StateRestored) -> None:
        """Take the jobs that are over as they are: no commands follow from them."""
        over = {record.job: record for record in event.jobs if record.state.is_final}
        self._stored.update(over)
        self._written.update((a.job, a) for a in event.allocations if a.job in over and not a.placements)

    def forget(self, job: str) -> None:
        """Forget a job that is removed."""
        for known in (self._stored, self._written, self._paused_at):
            known.pop(job, None)

    def records(self, jobs: Iterable[Job]) -> list[StoreJob]:
        """Return the records that have changed."""
        changed = [job for job in jobs if job.record is not self._stored.get(job.id)]
        self._stored.update((job.id, job.record) for job in changed)
        return [StoreJob(job.record, job.take_items()) for job in changed]

    def allocations(self, jobs: Iterable[Job]) -> list[WriteAllocation]:
        """Return the newest allocations, if they have changed."""
        newest = [allocation for job in jobs if (allocation := job.generations.newest)]
        changed = [allocation for allocation in newest if allocation is not self._written.get(allocation.job)]
        self._written.update((allocation.job, allocation) for allocation in changed)
        return [WriteAllocation(allocation) for allocation in changed]

    def assignments(self, hosts: Iterable[Host]) -> list[AssignJobs]:
        """Return the jobs that hold slots of each host, if its agent watches other jobs or was last told to.

        The jobs whose environments the agent must have are part of this, also if only these differ. A host that has
        sent no heartbeat is left out: workers may run there that this scheduler does not know of.
        """
        commands = []
        for host in hosts:
            name, incarnation = host.record.host, host.record.incarnation
            jobs = frozenset(job.id for job, _ in self._pool.held_on(name))
            environments = self._environments.of_host(host)
            is_settled = jobs == host.watched and host.assigned in (None, jobs) and environments == host.prepares
            if host.is_alive and host.is_heard and not is_settled:
                host.watched = host.assigned = jobs
                host.prepares = environments
                commands.append(AssignJobs(name, incarnation, tuple(sorted(jobs)), environments))
        return commands

    def pauses(self, jobs: Iterable[Job], *, now: float) -> list[PauseWorkers]:
        """Return which jobs to ask for a last checkpoint: at once, and again until one is saved."""
        commands = []
        pausing = (self._pool.jobs[name] for name in self._paused_at)
        for job in {job.id: job for job in (*jobs, *pausing)}.values():
            if job.is_over or job.intent is Intent.TRAIN or not job.generations.has_started:
                self._paused_at.pop(job.id, None)
            elif now - self._paused_at.get(job.id, float("-inf")) >= PAUSE_AGAIN_SECONDS:
                self._paused_at[job.id] = now
                hosts = sorted({worker.slot.host for worker in job.workers.values()})
                commands.append(PauseWorkers(job.id, job.record.lineage, tuple(hosts)))
        return commands

    def stops(self, event: Event, jobs: Iterable[Job]) -> list[StopWorkers]:
        """Return the workers that no job needs: once, and again with each heartbeat that does not list them as gone."""
        held: dict[str, list[Worker]] = {job.id: list(job.workers.values()) for job in jobs}
        heard = None
        if isinstance(event, Heartbeat) and event.host in self._pool.hosts:
            heard = event.host
            for job, worker in self._pool.held_on(heard):
                held.setdefault(job.id, []).append(worker)
        stops: dict[tuple[str, str, int], list[int]] = {}
        for name, workers in held.items():
            for worker in self._pool.jobs[name].unneeded(workers):
                if not worker.stop_sent or worker.slot.host == heard:
                    worker.mark_stop_sent()
                    stops.setdefault((name, worker.slot.host, worker.incarnation), []).append(worker.number)
        return [StopWorkers(*key, workers=tuple(sorted(set(numbers)))) for key, numbers in sorted(stops.items())]
