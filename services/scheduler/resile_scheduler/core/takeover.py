"""Taking over from an earlier scheduler: what it stored becomes the state of this one."""

from resile_shared.messages.allocations import Allocation
from resile_shared.messages.jobs import JobRecord, JobState
from resile_shared.messages.message import at

from .allocator import Allocator
from .events import StateRestored
from .host_events import HostEvents
from .state.job import Job
from .state.lifecycle import Step
from .state.pool import Pool
from .state.slot_sets import SlotId
from .state.worker import Phase, Worker

_SINCE = ("waiting_since", "holding_since")
"""The fields of a record that say since when a job has been waiting or holding slots."""


class Takeover:
    """Fills an empty pool. Workers are presumed alive until their hosts are lost."""

    def __init__(self, pool: Pool, allocator: Allocator, host_events: HostEvents, *, epoch: int) -> None:
        self._pool = pool
        self._allocator = allocator
        self._host_events = host_events
        self._epoch = epoch

    def restore(self, event: StateRestored, *, now: float) -> None:
        """Take over what is stored."""
        self._pool.last_number = event.last_number
        for record in sorted(event.jobs, key=lambda r: (r.submitted, r.job)):
            job = self._pool.add_job(_begun_by(record, now))
            self._pool.applied_commands.update(dict.fromkeys(record.applied_commands, job.id))
        for host in event.hosts:
            self._host_events.on_record(host, now=now, is_live=False)
        for allocation in sorted(event.allocations, key=self._is_abandoned):
            if allocation.job in self._pool.jobs:
                self._restore_allocation(self._pool.jobs[allocation.job], allocation, now)
        for job in self._pool.jobs.values():
            self._repair(job)
            self._host_events.drop_orphans(job, now=now)
        self._pool.take_causes()
        self._pool.changed(None)

    def _is_abandoned(self, allocation: Allocation) -> bool:
        """Whether the job's record says that it has no slots any more, so that others may have had them since."""
        job = self._pool.jobs.get(allocation.job)
        return job is not None and _has_given_up(job)

    def _restore_allocation(self, job: Job, allocation: Allocation, now: float) -> None:
        is_settled = job.is_over and not allocation.placements
        job.restore(allocation if is_settled else allocation.model_copy(update={"epoch": self._epoch}))
        for placement in allocation.placements:
            slot = SlotId(placement.host, placement.slot)
            if slot in self._pool.holders:  # it was handed on, and a crash came before this job's allocation was stored
                continue
            worker = Worker(
                placement.worker,
                slot,
                placement.incarnation,
                now,
                phase=Phase.MEMBER if placement in job.generations.active else Phase.STARTING,
                address=placement.address,
                was_seen=placement.address is not None,
            )
            self._pool.add_worker(job, worker)

    def _repair(self, job: Job) -> None:
        """Complete what a crash between the storing of a record and of its allocation left undone."""
        state = job.record.state
        if _has_given_up(job):
            self._allocator.abandon(job, state.value)
            if not job.is_over:
                job.generations.deactivate()
        elif not job.generations.placements:
            job.enter(Step.REQUEUE)
        else:
            if state in (JobState.RESCALING, JobState.RECOVERING) and not job.generations.is_settling:
                job.enter(Step.SETTLE)
        if not (job.is_over or job.generations.placements):
            job.go_back(job.record.checkpoint.iteration if job.record.checkpoint else 0)


def _has_given_up(job: Job) -> bool:
    return job.record.state in (JobState.QUEUED, JobState.ACCEPTED, JobState.PAUSED) or job.is_over


def _begun_by(record: JobRecord, now: float) -> JobRecord:
    """Return the record with ``now`` instead of later times: the clock may have been set back since it was stored."""
    latest = at(now)
    later: dict[str, object] = {name: latest for name in _SINCE if (since := getattr(record, name)) and since > latest}
    if record.usage.since and record.usage.since > latest:
        later["usage"] = record.usage.model_copy(update={"since": latest})
    return record.model_copy(update=later) if later else record
