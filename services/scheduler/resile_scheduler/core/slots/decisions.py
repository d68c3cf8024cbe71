"""Decides which slots each job should have, and takes the next steps towards that.

1. `resile_scheduler.policies`: how many workers should each job have?
2. `placement`: on which slots?
3. `allocator`: what can be done towards that now? A slot of another job is free, and so ordered for this one, only once
   the release of its worker was seen.

A policy sees all jobs each time; the rest is repeated only for what has changed (`job_view.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from resile_shared.messages.jobs import Intent, JobState

from ...policies.demand import Policy, Target
from ...policies.ranked import no_slots
from ..allocator import Allocator, next_change
from ..gangs import Gangs
from ..job_ends import JobEnds
from ..state.job import Job
from ..state.lifecycle import Step
from ..state.pool import Cause, Pool
from ..state.slot_sets import SlotId, without
from .environment_requests import EnvironmentRequests
from .host_groups import HostGroups
from .job_view import JobView
from .moves import Moves
from .placement import Want, place
from .sharing import Sharing
from .supply import Supply

MOST_CAUSES = 3
"""The reason of a change names at most this many causes."""


@dataclass(frozen=True)
class SlotCounts:
    """How many slots are held and free, and how many more jobs could use."""

    held: int
    """Slots that workers hold, on any host."""
    free: int
    wanted: int
    """How many more slots jobs could use, whatever the policy gives them."""


class Decisions:
    """Shares the slots of the pool."""

    def __init__(
        self,
        pool: Pool,
        allocator: Allocator,
        ends: JobEnds,
        gangs: Gangs,
        environments: EnvironmentRequests,
        *,
        policy: Policy,
    ) -> None:
        self._pool = pool
        self._environments = environments
        self._allocator = allocator
        self._ends = ends
        self._gangs = gangs
        self._policy = policy
        self._caps: Mapping[str, int] = {}
        self._is_suspended = False
        self._groups = HostGroups(pool)
        self._views: dict[str, JobView] = {}
        """Views of all jobs that are not over, in the order of their submissions."""
        self._requiring: dict[str, JobView] = {}
        """Views of the jobs that require packages."""
        self._by_class: dict[str, Sharing] | None = None
        """The jobs that share slots, by the class of device on which they do; None: not known."""
        self._restless: dict[str, Job] = {}
        self._unsettled: dict[str, JobView] = {}
        """Views of the jobs that do not have the slots that they should have."""
        self._supply = Supply(pool)
        self._moves = Moves(pool, self._groups, self._supply, self._views)

    def change_policy(self, policy: Policy, cause: str, *, caps: Mapping[str, int] = MappingProxyType({})) -> None:
        """Use ``policy`` from now on, with ``caps`` of tenants; ``cause`` is the reason in the histories."""
        self._policy, self._caps = policy, caps
        self._pool.changed(None, cause)

    def suspend(self) -> None:
        """Give no job a slot from now on, whatever the policy."""
        if not self._is_suspended:
            self._is_suspended = True
            self._pool.changed(None)

    def explain(self) -> dict[str, str]:
        """Return why each job has what it has, or what it is waiting for."""
        reasons = {name: self._explain(view) for name, view in self._views.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def shortfall(self, job: str) -> str:
        """Return what ``job`` is waiting for if all hosts that are up together cannot run it, else an empty string."""
        view = self._views.get(job)
        if view is not None and (drained := self._drained(view)):
            return drained
        if view is None or not self._groups.classes() or view.demand.least <= view.demand.most:
            return ""
        if self._environments.reason(view, self._groups.fitting(view.device_class, view.job.record.spec.group)):
            return ""
        return self._explain(view)

    def _explain(self, view: JobView) -> str:
        if not view.is_sharing:
            return "waiting a while: its last starts made no progress" if view.job.is_training else ""
        if view.target is None or (not view.target.workers and view.job.generations.has_started):
            return ""
        if not view.target.workers and (missing := self._missing(view)):
            return missing
        return _reason(view.job, view.target)

    def slot_counts(self) -> SlotCounts:
        """Return how many slots are held and free, and how many more jobs could use."""
        free = sum(map(len, self._supply.free().values()))
        sharing = (view for view in self._views.values() if view.is_sharing)
        wanted = sum(max(0, view.demand.most - len(view.held)) for view in sharing)
        return SlotCounts(held=len(self._pool.holders), free=free, wanted=wanted)

    def check(self, *, now: float) -> None:
        """Request a decision if it is time for one: moves take too long, or may be tried again."""
        self._moves.check(now=now)

    @property
    def restless(self) -> Mapping[str, Job]:
        """The jobs that every decision looks at, though nothing has happened to them."""
        return self._restless

    def decide(self, due: Sequence[Job], causes: Sequence[Cause], *, now: float) -> None:
        """Decide once, after ``causes``; the jobs that are ``due`` may have changed."""
        self._moves.begin()
        for job in due:
            self._pool.release(job)
            if job.record.state is JobState.ACCEPTED:
                job.enter(Step.ENQUEUE)
        looked_at = {view.name: view for job in due if (view := self._look_at(job, now))} | self._unsettled
        are_new = self._groups.refresh()
        if are_new or self._by_class is None:
            self._by_class = self._grouped()
        self._limit((self._views if are_new else looked_at).values(), self._by_class, now=now)
        if self._pool.free_slots():
            looked_at |= {name: view for name, view in self._views.items() if view.is_scattered(now=now)}
        for device_class, sharing in self._by_class.items():
            self._share(device_class, sharing, looked_at, causes, now=now)
        for name, view in self._requiring.items():
            if are_new or name in looked_at:
                self._environments.request(view, self._groups)
        for job in due:
            job.explain_change("")

    def _look_at(self, job: Job, now: float) -> JobView | None:
        """Update and return the view of ``job``; None if the job is over."""
        self._supply.look_at(job)
        self._restless.pop(job.id, None)
        self._unsettled.pop(job.id, None)
        self._moves.forget(job.id, is_over=job.is_over)
        if job.is_over:
            if self._views.pop(job.id, None):
                self._by_class = None
            if self._requiring.pop(job.id, None):
                self._environments.forget(job.id)
            return None
        view = self._views.get(job.id)
        if view is None:
            view = self._views[job.id] = JobView(job, now=now)
            self._by_class = None
            if job.record.spec.requirements:
                self._requiring[job.id] = view
        if view.look(self._pool, now=now):
            self._by_class = None
        if view.is_restless:
            self._restless[job.id] = job
        return view

    def _limit(self, views: Iterable[JobView], by_class: Mapping[str, Sharing], *, now: float) -> None:
        """Find how many workers ``views`` can have at most and where, and whether they are on too many hosts."""
        views = list(views)
        for view in views:
            view.limit_to(self._groups)
        for device_class, each in by_class.items():
            each.confine(self._groups, device_class, now=now)
        for view in views:
            if sharing := by_class.get(view.device_class):
                sharing.refresh(view)
            self._moves.look_at(view)

    def _grouped(self) -> dict[str, Sharing]:
        """Return the jobs that share slots by class of device.

        A job stays on the class on which it has workers, or has trained.
        """
        by_class: dict[str, list[JobView]] = {}
        minimums: Counter[str] = Counter()
        for view in sorted(self._views.values(), key=lambda view: not view.own_class):
            device_class = view.own_class or self._best_class(view, by_class, minimums)
            if device_class != view.device_class:
                view.device_class = device_class
                view.limit_to(self._groups)
            of_class = by_class.setdefault(view.device_class, [])
            if view.is_sharing:
                of_class.append(view)
                minimums[view.device_class] += view.demand.least
        return {name: Sharing(views) for name, views in by_class.items()}

    def _best_class(self, view: JobView, by_class: Mapping[str, Sequence[JobView]], minimums: Mapping[str, int]) -> str:
        """Return the class with the most fitting slots per job that shares it; empty: there are no hosts.

        Classes that can hold the job's minimum come first, preferably those that can hold it on top of the other jobs'
        minimums.
        """
        least = view.demand.least

        def suitability(device_class: str) -> tuple[bool, bool, float]:
            fitting = self._groups.fitting(device_class, view.labels).num_slots
            left = self._groups.of_class(device_class).num_slots - minimums.get(device_class, 0)
            return fitting >= least, left >= least, fitting / (1 + len(by_class.get(device_class, ())))

        return max(self._groups.classes(), key=suitability, default="")

    def _share(
        self,
        device_class: str,
        sharing: Sharing,
        looked_at: dict[str, JobView],
        causes: Sequence[Cause],
        *,
        now: float,
    ) -> None:
        policy = no_slots if self._is_suspended else self._policy
        targets, is_new = sharing.targets(policy, self._groups.of_class(device_class).num_slots)
        looked_at |= self._moves.exchange_slots(device_class, targets, now=now)
        asked = sharing.views if is_new else sharing.among(looked_at)
        wants, pending = self._wants(asked, targets, looked_at, now=now)
        placed = self._place(wants)
        for view, target in pending:
            wanted = view.plan or placed.get(view.name, view.usable)
            if view.name in looked_at or not view.is_settled(target, wanted):
                if view.plan:
                    view.job.explain_change(view.plan_reason)
                elif view.moves_to(wanted, now=now):
                    view.job.explain_change("it moves to fewer hosts")
                if not view.waits(wanted, is_free=self._supply.is_free):
                    self._approach(view.job, target, wanted, _describe(causes, view.job), now=now)
            view.target, view.wanted = target, wanted
            if wanted != view.held or len(wanted) != target.workers:
                self._unsettled[view.name] = view
        if sharing.is_confined:
            self._moves.make_room(wants, placed, targets, now=now)

    def _wants(
        self, asked: Sequence[JobView], targets: Mapping[str, Target], looked_at: Mapping[str, JobView], *, now: float
    ) -> tuple[list[Want], list[tuple[JobView, Target]]]:
        """Return what has to be placed, and the jobs for which something may be done, with their targets."""
        wants, pending = [], []
        for view in asked:
            target = targets[view.name]
            is_looked_at = view.name in looked_at
            if target.workers and target is view.target and not is_looked_at:
                continue  # it has what it should have: else it would be looked at
            if not target.workers and (missing := self._missing(view)):
                target = replace(target, reason=missing)
            is_placed = target.workers == len(view.usable) and not (is_looked_at and view.is_scattered(now=now))
            if not is_placed and not view.plan:
                wants.append(view.want(target.workers, self._groups, now=now))
            elif not is_looked_at and not view.plan and view.is_settled(target, view.usable):
                view.target = target
                continue
            pending.append((view, target))
        return wants, pending

    def _place(self, wants: list[Want]) -> dict[str, tuple[SlotId, ...]]:
        if not wants:
            return {}
        free, released = self._supply.free(), self._supply.released()
        if planned := self._moves.planned():
            free, released = without(free, planned), without(released, planned)
        return place(wants, free=free, released=released, domains=self._groups.domains, devices=self._supply.devices())

    def _missing(self, view: JobView) -> str:
        """Return what host a job is waiting for, if the pool has hosts but none that it can use; else nothing."""
        if drained := self._drained(view):
            return drained
        labels = view.job.record.spec.group
        fitting = self._groups.fitting(view.device_class, labels)
        if fitting.num_slots:
            return self._environments.reason(view, fitting)
        if not self._groups.classes():
            return ""
        if self._groups.of_class(view.device_class).num_slots:
            return f"waiting for a host with the labels {labels}: none of those that are up has them"
        if not view.own_class:
            return ""
        return f"waiting for a host of the class on which it trained, {view.own_class}: another one gives other bits"

    def _drained(self, view: JobView) -> str:
        """Return for which drained hosts a job is waiting: it does not fit on the others, and with these it would."""
        least = view.demand.least
        if self._groups.fitting(view.device_class, view.labels).num_slots >= least:
            return ""
        for device_class in [view.own_class] if view.own_class else self._groups.drained_classes():
            num_up = self._groups.fitting(device_class, view.labels).num_slots
            drained = self._groups.drained(device_class, view.labels)
            if num_up < least <= num_up + drained.num_slots:
                wanted = f"{least} slots" if least > 1 else "a slot"
                are_others = view.own_class and set(self._groups.classes()) - {view.own_class}
                others = "; hosts of another class give other bits" if are_others else ""
                return f"waiting for {wanted}: {_enumerated(sorted(drained.hosts))} drained{others}"
        return ""

    def _approach(self, job: Job, target: Target, wanted: tuple[SlotId, ...], cause: str, *, now: float) -> None:
        """Take the next step towards ``wanted``."""
        if target.error:
            self._ends.fail(job, target.error, now=now)
            return
        if job.is_gang and job.generations.has_started:
            self._gangs.approach(job, target, is_suspended=self._is_suspended, now=now)
            return
        if (job.target.workers, job.num_assigned) != (target.workers, len(wanted)):
            self._pool.touch(job)
        is_there = set(wanted) == {*job.held.values()}
        job.set_target(target, cause, num_assigned=len(wanted), is_there=is_there)
        if not target.workers and job.generations.has_started:
            if job.is_service:
                self._gangs.release(job, target.reason, now=now)
                return
            job.intend(Intent.SUSPEND, target.reason, now=now)
            self._pool.touch(job)
            return
        free = self._within_cap(job, [slot for slot in wanted if self._supply.is_free(slot)], wanted)
        change = next_change(job, target, wanted, free=free, pool=self._pool)
        if change is not None:
            self._allocator.apply(job, change, now=now)
        self._allocator.give_order(job)
        job.explain_change("")
        if job.record.state is JobState.QUEUED and job.record.kind != "queued":
            job.note("queued", _reason(job, target), now=now)
            self._pool.touch(job)

    def _within_cap(self, job: Job, free: Sequence[SlotId], wanted: Sequence[SlotId]) -> frozenset[SlotId]:
        """Return those of ``free`` that ``job`` may take now: slots that others of its tenant still hold count.

        A worker that takes another one's place counts with it.
        """
        tenant = job.record.spec.tenant
        if tenant not in self._caps:
            return frozenset(free)
        jobs = [other for other in self._pool.jobs.values() if other.record.spec.tenant == tenant]
        kept = sum(slot in wanted for slot in job.held.values())
        room = self._caps[tenant] - sum(len(other.workers) for other in jobs if other is not job) - kept
        return frozenset(free[: max(0, room)])


def _describe(causes: Sequence[Cause], job: Job) -> str:
    """Return what happened, for the history of ``job``; empty: nothing outside of it."""
    texts = [cause.text for cause in causes if cause.job != job.id]
    more = f" and {len(texts) - MOST_CAUSES} more" if len(texts) > MOST_CAUSES else ""
    return ", ".join(texts[:MOST_CAUSES]) + more


def _enumerated(names: Sequence[str]) -> str:
    """Name the first three hosts, with the verb, as in "host-1 and host-2 are"."""
    if len(names) == 1:
        return f"{names[0]} is"
    *first, last = names[:3] if len(names) <= 3 else (*names[:3], f"{len(names) - 3} more")
    return f"{', '.join(first)} and {last} are"


def _reason(job: Job, target: Target) -> str:
    if job.record.state is JobState.QUEUED and target.workers:
        return "waiting for slots that other jobs release"
    return target.reason
