"""What decisions keep of a job from one to the next, so that they look again only at jobs that have changed.

A job is looked at again

- when something happened to it: all code that changes a job touches it (`Pool.touch`);
- as long as time or its workers may change what can be done for it: while its newest generation is not active, and
  while it avoids a host or waits before its next start.

What depends on other jobs and on hosts (the target, the slots, how many it can have at most) is compared with what it
was.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf

from resile_shared.messages.reports import Ready

from ...policies.demand import BatchRange, Demand, Room, Target
from ..accounting import attained, due_since, held_since, was_due
from ..state.job import Job
from ..state.pool import Pool
from ..state.slot_sets import SlotId
from ..state.topology import num_places
from .host_groups import HostGroup, HostGroups
from .placement import Want
from .relocation import Mover

MOVE_SECONDS = 60.0
"""The least number of seconds between two moves of a job to fewer hosts."""
MOVE_CHANGES = 40.0
"""A job moves again only after it has trained for as long as this many changes cost it."""
PIN_SECONDS = 600.0
"""Seconds after which a job that could not make room is asked again: each time may cost others a change."""
EXCHANGE_SECONDS = 30.0
"""An exchange of slots that takes longer than this is abandoned."""


class JobView:
    """One job that is not over, as it was when it was looked at last."""

    def __init__(self, job: Job, *, now: float) -> None:
        self.job = job
        self.name = job.id
        self.is_sharing = False
        """Whether it takes part in the sharing of slots."""
        self.own_class = ""
        """The class of device on which it trains or has trained; empty: any will do."""
        self.device_class = ""
        """The class of device on which it shares slots."""
        self.held: tuple[SlotId, ...] = ()
        """The slots of its newest membership, in rank order."""
        self.usable: tuple[SlotId, ...] = ()
        """The held slots that it may keep."""
        self.demand = _demand(job, now=now)
        self.target: Target | None = None
        """Its target in the last decision in which it shared slots."""
        self.wanted: tuple[SlotId, ...] | None = None
        """The slots that it should have by the last decision in which it shared slots."""
        self._joining: frozenset[SlotId] = frozenset()
        self.avoided: frozenset[str] = frozenset()
        """The hosts that it avoids after failures."""
        self.plan: tuple[SlotId, ...] = ()
        """The slots that it should have after an exchange with other jobs; empty: none is under way."""
        self.plan_reason = ""
        """The purpose of the plan."""
        self._moved_at = float("-inf")
        self._pinned_until = float("-inf")
        self.tried_at = float("-inf")
        """When an exchange was last looked for."""
        self.limit = 0
        """The most workers that it can use, wherever they run."""
        self.on_host: Counter[str] = Counter()
        """How many of the slots that it may keep are on each host."""
        self._may_be_narrower = False
        """Whether fewer hosts, racks or zones may be enough for the slots that it may keep."""

    def look(self, pool: Pool, *, now: float) -> bool:
        """Update the view; return whether the job shares slots with other jobs than before."""
        job, before = self.job, (self.is_sharing, self.own_class)
        must_wait = not job.generations.placements and job.start_backoff.is_waiting(now=now)
        self.is_sharing = job.is_training and not must_wait
        self.own_class = _device_class(job, pool)
        held = job.held
        self.held = tuple(held.values())
        self.usable = tuple(slot for slot in self.held if pool.is_usable(slot))
        self.on_host = Counter(slot.host for slot in self.usable)
        self._joining = frozenset(held[worker] for worker in job.joiners & held.keys())
        self.avoided = job.backoff.avoided(now=now)
        self.demand = _demand(job, now=now)
        if len({slot.host for slot in self.held}) > 1:
            self.demand = replace(self.demand, is_scattered=True)
        self.limit = job.record.spec.max_workers
        if self.demand.num_shards is not None:
            self.limit = min(self.limit, self.demand.num_shards)
        if job.is_service:
            wanted = len(held) if job.load.wanted is None else job.load.wanted
            self.limit = min(self.limit, max(wanted, job.least_workers))
        if job.growth_limit.most is not None:
            self.limit = min(self.limit, max(job.growth_limit.most, job.least_workers))
        return (self.is_sharing, self.own_class) != before

    @property
    def labels(self) -> str:
        """The labels that its hosts must have, as in ``gpu=h200,zone=a``."""
        return self.job.record.spec.group

    def pin(self, *, now: float) -> bool:
        """Count its slots as the only ones that it can have, for a while; return whether that is new.

        It should move, but too few other slots are free at the same time.
        """
        is_new = not self.is_pinned(now=now)
        self._pinned_until = now + PIN_SECONDS
        return is_new

    def is_pinned(self, *, now: float) -> bool:
        """Whether it can have no other slots than those that it has."""
        if not self.usable or self.usable != self.held:
            return False
        return self.job.is_gang or now < self._pinned_until

    @property
    def is_restless(self) -> bool:
        """Whether time or its workers may change what can be done for it, though nothing happens to it."""
        job = self.job
        return job.generations.is_settling or job.backoff.is_active or job.start_backoff.is_active

    def limit_to(self, groups: HostGroups) -> None:
        """Find how many workers it can have at most: on the hosts where it may start some, and where it already is."""
        eligible = self._eligible(groups)
        most = self.limit
        if eligible.num_slots < most:
            elsewhere = sum(slot.host not in eligible.hosts for slot in self.usable)
            most = min(most, eligible.num_slots + elsewhere)
        on_one = eligible.most_on_one or None
        if (self.demand.most, self.demand.slots_per_host) != (most, on_one):
            self.demand = replace(self.demand, most=most, slots_per_host=on_one)
        self._may_be_narrower = self._is_wider_than_needed(groups, eligible)

    def confine(self, rooms: tuple[Room, ...] | None) -> None:
        """Let policies know which slots it may use."""
        if self.demand.rooms != rooms:
            self.demand = replace(self.demand, rooms=rooms)

    def _is_wider_than_needed(self, groups: HostGroups, eligible: HostGroup) -> bool:
        if len(self.on_host) < 2:
            return False
        # Where it may start no workers it can have no more slots than it has.
        most_on_one = max(eligible.most_on_one, *self.on_host.values())
        num_needed = -(-len(self.usable) // most_on_one)
        return num_places(self.on_host, groups.domains) != (1, 1, num_needed)

    def _eligible(self, groups: HostGroups) -> HostGroup:
        """Return the hosts on which it may start workers, or will when slots are free."""
        fitting = groups.fitting(self.device_class, self.job.record.spec.group)
        if self.waits_for_environment(fitting):
            fitting = groups.with_environment(fitting, self.name)
        if not self.avoided:
            return fitting
        allowed = groups.without(fitting, self.avoided)
        # A job without workers, or whose number of workers is exact, is never left without any host.
        is_needed = self.job.target.is_exact or not self.job.generations.has_started
        return fitting if is_needed and not allowed.hosts else allowed

    def waits_for_environment(self, fitting: HostGroup) -> bool:
        """Whether it may start workers only where its environment is. If it fits nowhere, it waits for hosts."""
        job = self.job
        return bool(job.record.spec.requirements) and fitting.num_slots + len(self.usable) >= job.least_workers

    def want(self, workers: int, groups: HostGroups, *, now: float) -> Want:
        """Return what to place so that it has ``workers`` workers."""
        return Want(
            self.name,
            workers,
            held=self.usable,
            joining=self._joining,
            hosts=self._eligible(groups).hosts,
            is_spread=self.job.record.spec.placement == "spread",
            least_kept=self.job.least_workers if self._can_move(now) else None,
        )

    def is_scattered(self, *, now: float) -> bool:
        """Whether it may move to fewer hosts, racks or zones."""
        return self._may_be_narrower and self._can_move(now)

    def _can_move(self, now: float) -> bool:
        """Whether workers may be replaced by others in fewer places.

        During the move it has other numbers of workers, so a job that allows only some numbers stays.
        """
        return self._can_replace(now) and not self.job.sizes and self.job.record.spec.placement == "pack"

    def _can_replace(self, now: float) -> bool:
        """Whether workers may be replaced by others."""
        job = self.job
        is_steady = job.generations.has_started and not job.generations.is_settling and self.usable == self.held
        rest = max(MOVE_SECONDS, MOVE_CHANGES * self.demand.change_seconds)
        return is_steady and not (job.target.is_exact or job.is_gang) and now - self._moved_at >= rest

    @property
    def is_too_wide(self) -> bool:
        """Whether it is on more hosts than it needs."""
        num_hosts = len(self.on_host)
        return num_hosts > 1 and num_hosts > -(-len(self.usable) // (self.demand.slots_per_host or 1))

    def may_exchange(self, target: Target, *, now: float) -> bool:
        """Whether it has what it should have, and may have other slots instead."""
        return self._has_all(target) and self._can_move(now)

    def may_make_room(self, target: Target, *, now: float) -> bool:
        """Whether it has what it should have, and may leave its slots for a job that may not run elsewhere."""
        return self._has_all(target) and self._can_replace(now)

    def _has_all(self, target: Target) -> bool:
        return target.workers == len(self.usable) and self.wanted == self.held and not self.plan

    def mover(self, groups: HostGroups) -> Mover:
        """Return where it is and could be. A job that is limited to some sizes moves as a whole."""
        least = len(self.usable) if self.job.sizes else self.job.least_workers
        is_spread = self.job.record.spec.placement == "spread"
        return Mover(self.usable, least, self._eligible(groups).hosts, is_spread)

    def may_use(self, host: str, groups: HostGroups) -> bool:
        """Whether it may start workers on a host."""
        return host in self._eligible(groups).hosts

    def begin_exchange(self, plan: tuple[SlotId, ...], reason: str, *, now: float) -> None:
        """Let it have the slots of ``plan``, which are free or which other jobs leave."""
        self.plan, self.plan_reason = plan, reason
        self._moved_at = now

    def goes_on_exchanging(self, target: Target | None, *, now: float) -> bool:
        """Whether it still has to get the slots of its plan; if not, the plan is dropped."""
        has_changed = target is None or target.workers != len(self.plan) or self.usable != self.held
        if has_changed or self.is_late(now=now) or set(self.held) == set(self.plan):
            self.plan = ()
        return bool(self.plan)

    def is_late(self, *, now: float) -> bool:
        """Whether an exchange takes too long."""
        return bool(self.plan) and now - self._moved_at >= EXCHANGE_SECONDS

    def waits(self, wanted: tuple[SlotId, ...], *, is_free: Callable[[SlotId], bool]) -> bool:
        """Whether it stays as it is until others leave the slots of its plan; it first leaves those of their plans."""
        kept = set(self.held).intersection(wanted)
        leaves_some = kept and len(kept) < len(self.held)
        return bool(self.plan) and not leaves_some and not all(slot in kept or is_free(slot) for slot in wanted)

    def moves_to(self, wanted: tuple[SlotId, ...], *, now: float) -> bool:
        """Record that it should have ``wanted``; return whether it gives up slots without having too many."""
        is_move = len(wanted) >= len(self.usable) and not set(self.usable).issubset(wanted)
        if is_move:
            self._moved_at = now
        return is_move

    def is_settled(self, target: Target, wanted: tuple[SlotId, ...]) -> bool:
        """Whether it has what it should have, and this is recorded: with the reason, if the target is exact."""
        is_same = target == self.target if target.is_exact else target.is_like(self.target)
        return is_same and wanted == self.held and wanted == self.wanted


def _device_class(job: Job, pool: Pool) -> str:
    hosts = (pool.hosts.get(placement.host) for placement in job.generations.placements)
    return next((host.record.device_class for host in hosts if host is not None), job.record.device_class)


def _demand(job: Job, *, now: float) -> Demand:
    ready, held = job.record.ready, job.held
    seen = job.observer.observation
    return Demand(
        job=job.id,
        number=job.number,
        tenant=job.record.spec.tenant,
        holding_since=held_since(job, now=now) if held else inf,
        was_due=bool(held) and was_due(job, now=now),
        due_since=due if (due := due_since(job)) <= now else inf,
        attained=seen.attained if held else attained(job, now=now),
        priority=job.record.priority,
        least=job.least_workers,
        most=-1,
        num_shards=ready.num_shards if ready else None,
        holds_slots=bool(held),
        is_preemptible=not job.must_keep_slots,
        assigned_workers=job.target.workers if held else 0,
        iteration=job.iteration_seen,
        batch_size=(job.batch_size or ready.batch_size) if ready else 0,
        iterations_total=(seen.iterations_total or ready.iterations_total) if ready else None,
        has_fixed_length=ready is None or ready.has_fixed_length,
        active_workers=len(job.generations.active) if job.generations.has_started else 0,
        active_since=job.generations.active_since,
        active_until=job.generations.active_until,
        sizes=job.sizes or None,
        batch=_batch_range(job, ready) if ready else None,
        throughput=seen.throughput,
        most_measured=seen.most_measured,
        noise_scale=seen.noise_scale,
        change_seconds=seen.change_seconds,
        deadline_seconds=seen.deadline_seconds,
    )


def _batch_range(job: Job, ready: Ready) -> BatchRange | None:
    """Return the range of batches that a job declares, the largest of which has enough samples for its minimum."""
    declared = ready.batch_range
    if declared is None:
        return None
    most_per_slot = declared.most // max(job.smallest_size, 1)
    return BatchRange(declared.least, declared.most, min(declared.least_per_slot, most_per_slot))
