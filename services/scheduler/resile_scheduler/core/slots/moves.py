"""Decides which jobs move to other slots: to be on fewer hosts, or to make room for a job confined to some hosts.

`relocation.py` finds the slots. A move is under way until the job has the slots of its plan, or it takes too long.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from ...policies.demand import Target
from ..state.pool import Pool
from ..state.slot_sets import SlotId, without
from .host_groups import HostGroups
from .job_view import MOVE_SECONDS, JobView
from .placement import Want
from .relocation import Holder, exchange, find_room, may_stay
from .supply import Supply

MOST_EXCHANGES = 4
"""At most this many exchanges are looked for per decision."""


class Moves:
    """The moves of jobs, by their ``views``."""

    def __init__(self, pool: Pool, groups: HostGroups, supply: Supply, views: Mapping[str, JobView]) -> None:
        self._pool = pool
        self._groups = groups
        self._supply = supply
        self._views = views
        self._too_wide: dict[str, JobView] = {}
        """Views of the jobs that are on more hosts than they need."""
        self._under_way: dict[str, JobView] = {}
        """Views of the jobs whose move is under way."""
        self._retry_at = inf
        """When jobs that could make room for others may move again."""

    def check(self, *, now: float) -> None:
        """Request a decision if a move takes too long, or if one may be tried again."""
        for view in self._under_way.values():
            if view.is_late(now=now):
                self._pool.changed(view.job)
        if now >= self._retry_at:
            self._pool.changed(None)

    def begin(self) -> None:
        """Begin a decision: what was to be tried again is tried in it."""
        self._retry_at = inf

    def look_at(self, view: JobView) -> None:
        """Find whether a job is on more hosts than it needs."""
        self._too_wide.pop(view.name, None)
        if view.is_too_wide:
            self._too_wide[view.name] = view

    def forget(self, job: str, *, is_over: bool) -> None:
        """Forget what a job needs, until it is looked at; if it is over, its move as well."""
        self._too_wide.pop(job, None)
        if is_over:
            self._under_way.pop(job, None)

    def planned(self) -> set[SlotId]:
        """Return the slots that jobs are to have by moves that are under way."""
        return {slot for view in self._under_way.values() for slot in view.plan}

    def exchange_slots(self, device_class: str, targets: Mapping[str, Target], *, now: float) -> dict[str, JobView]:
        """Let jobs that are on too many hosts exchange slots with others; return those whose slots are to change."""
        for view in list(self._under_way.values()):
            if view.device_class == device_class and not view.goes_on_exchanging(targets.get(view.name), now=now):
                del self._under_way[view.name]
        ready = (v for v in self._too_wide.values() if v.device_class == device_class and v.name in targets)
        due = [v for v in ready if now - v.tried_at >= MOVE_SECONDS and v.may_exchange(targets[v.name], now=now)]
        begun: dict[str, JobView] = {}
        for view in sorted(due, key=lambda view: (view.tried_at, view.job.number))[:MOST_EXCHANGES]:
            if view.name in begun:
                continue
            view.tried_at = now
            found = exchange(
                view.name,
                self._holders(view, targets, now=now),
                free=self._supply.free(),
                may_use=lambda name, host: self._views[name].may_use(host, self._groups),
                domains=self._groups.domains,
            )
            for name, plan in found.items():
                begun[name] = self._under_way[name] = self._views[name]
                begun[name].begin_exchange(plan, "it exchanges slots, for fewer hosts of a job", now=now)
        return begun

    def make_room(
        self,
        wants: Sequence[Want],
        placed: Mapping[str, tuple[SlotId, ...]],
        targets: Mapping[str, Target],
        *,
        now: float,
    ) -> None:
        """Move jobs to free slots, so that jobs confined to other hosts can take the slots that they leave."""
        lacking = [want for want in wants if len(placed[want.job]) < want.workers]
        if not lacking:
            return
        self._retry_at = now + MOVE_SECONDS
        views = [self._views[name] for name in targets]
        movers = {
            view.name: view.mover(self._groups) for view in views if view.may_make_room(targets[view.name], now=now)
        }
        plans = self.planned()
        free = without(self._supply.free(), plans.union(*placed.values()))
        leaving = Counter(slot.host for view in self._under_way.values() for slot in set(view.held) - plans)
        for want in sorted(lacking, key=lambda want: (len(want.hosts), want.job)):
            num = want.workers - len(placed[want.job]) - sum(leaving[host] for host in want.hosts)
            found = find_room(want.hosts, num, movers, free=free, domains=self._groups.domains) if num > 0 else {}
            for name, plan in found.items():
                view = self._under_way[name] = self._views[name]
                view.begin_exchange(plan, f"it makes room for {want.job}, which may not use other hosts", now=now)
                free = without(free, set(plan))
                del movers[name]
                self._pool.changed(view.job)
            for name in may_stay(want.hosts, movers) if num > 0 and not found else ():
                if self._views[name].pin(now=now):
                    self._pool.changed(None)

    def _holders(self, view: JobView, targets: Mapping[str, Target], *, now: float) -> dict[str, Holder]:
        """Return what ``view`` and the jobs on its hosts hold, as far as they may move."""
        slots = (slot for name in {slot.host for slot in view.usable} for slot in self._pool.hosts[name].slots)
        names = {self._pool.holders[slot][0] for slot in slots if slot in self._pool.holders}
        views = (self._views[name] for name in names if name in targets and name in self._views)
        moving = (other for other in views if other.may_exchange(targets[other.name], now=now))
        return {other.name: Holder(other.usable, other.job.least_workers) for other in moving}
