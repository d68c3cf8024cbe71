"""What decisions keep of a job from one to the next, so that they look again only at jobs that have changed.

A job is looked at again

- when something happened to it: whoever changes a job touches it (`Pool.touch`);
- as long as time or its workers may change what can be done for it: while its newest generation is not active, and
  while it avoids a host or waits before its next start.

What depends on other jobs and on hosts (the target, the slots, how many it can have at most) is compared with what it
was.
"""

from dataclasses import dataclass, replace

from ..policies.demand import Demand, Target
from .host_groups import HostGroup, HostGroups
from .job import Job
from .placement import SlotId, Want
from .pool import Pool


@dataclass
class JobView:
    """One job that is not over, as it was when it was looked at last."""

    job: Job
    is_sharing: bool
    """Whether it takes part in the sharing of slots."""
    device_class: str
    """That on which it trains or has trained; empty: any will do."""
    held: tuple[SlotId, ...]
    """The slots of its newest membership, in rank order."""
    usable: tuple[SlotId, ...]
    """Those of them that it may keep."""
    joining: frozenset[SlotId]
    avoided: frozenset[str]
    """The hosts that it avoids."""
    demand: Demand
    """``most`` is as of the last decision."""
    limit: int
    """The most workers that it can use, wherever they run."""
    target: Target | None = None
    """That of the last decision in which it shared slots."""
    wanted: tuple[SlotId, ...] | None = None
    """The slots that it was to have then."""
    _most_as_of: tuple[str, int] = ("", -1)

    @classmethod
    def of(cls, job: Job, pool: Pool, *, now: float) -> "JobView":
        """Look at ``job``."""
        held = job.held
        must_wait = not job.generations.placements and job.start_backoff.is_waiting(now=now)
        limit = job.record.spec.max_workers
        if job.record.ready is not None:
            limit = min(limit, job.record.ready.num_shards)
        return cls(
            job,
            is_sharing=job.is_training and not must_wait,
            device_class=_device_class(job, pool),
            held=tuple(held.values()),
            usable=tuple(slot for slot in held.values() if pool.is_usable(slot)),
            joining=frozenset(held[worker] for worker in job.joiners & held.keys()),
            avoided=job.backoff.avoided(now=now),
            demand=_demand(job),
            limit=limit,
        )

    @property
    def is_restless(self) -> bool:
        """Whether time or its workers may change what can be done for it, though nothing happens to it."""
        job = self.job
        return job.generations.is_settling or job.backoff.is_active or job.start_backoff.is_active

    def eligible(self, device_class: str, groups: HostGroups) -> HostGroup:
        """Return the hosts on which it may start workers, or will when slots are free."""
        fitting = groups.fitting(device_class, self.job.record.spec.group)
        if not self.avoided:
            return fitting
        allowed = groups.without(fitting, self.avoided)
        # A job without workers, or whose number of workers is exact, is never left without any host.
        is_needed = self.job.target.is_exact or not self.job.generations.has_started
        return fitting if is_needed and not allowed.hosts else allowed

    def demand_on(self, device_class: str, groups: HostGroups) -> Demand:
        """Return what it can use on hosts of ``device_class``: those on which it may start workers, and where it is."""
        if self._most_as_of == (device_class, groups.version):
            return self.demand
        self._most_as_of = (device_class, groups.version)
        eligible = self.eligible(device_class, groups)
        most = self.limit
        if eligible.num_slots < most:
            elsewhere = sum(slot.host not in eligible.hosts for slot in self.usable)
            most = min(most, eligible.num_slots + elsewhere)
        if self.demand.most != most:
            self.demand = replace(self.demand, most=most)
        return self.demand

    def want(self, workers: int, device_class: str, groups: HostGroups) -> Want:
        """Return that it should have so many workers."""
        hosts = self.eligible(device_class, groups).hosts
        return Want(self.job.id, workers, held=self.usable, joining=self.joining, hosts=hosts)

    def is_settled(self, target: Target, wanted: tuple[SlotId, ...]) -> bool:
        """Whether it has what it should have, and this was seen to. The reason of an exact target is in the history."""
        is_same = target == self.target if target.is_exact else target.is_like(self.target)
        return is_same and wanted == self.held and wanted == self.wanted


def _device_class(job: Job, pool: Pool) -> str:
    placements = job.generations.placements
    return pool.hosts[placements[0].host].record.device_class if placements else job.record.device_class


def _demand(job: Job) -> Demand:
    ready, held = job.record.ready, job.held
    return Demand(
        job=job.id,
        number=job.number,
        tenant=job.record.spec.tenant,
        priority=job.record.priority,
        least=job.least_workers,
        most=-1,
        num_shards=ready.num_shards if ready else None,
        holds_slots=bool(held),
        assigned_workers=job.num_assigned if held else 0,
        iteration=job.iteration,
        batch_size=ready.batch_size if ready else 0,
        iterations_total=ready.iterations_total if ready else None,
        active_workers=len(job.generations.active) if job.generations.has_started else 0,
        active_since=job.generations.active_since,
        sizes=job.sizes or None,
    )
