"""Jobs that may not use every slot: who gets how many, compared with all that is possible in small pools."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from resile_scheduler.policies.demand import Demand, Policy, Room, Target
from resile_scheduler.policies.preemption import without_preemption
from resile_scheduler.policies.rooms import within_rooms
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.policies.tenants import by_tenant
from resile_shared.messages.pool import TenantShare
from resile_shared.policies import PolicyName

from .test_policies import demand, workers

A, B, C = (Room(name, 4) for name in "abc")
FAIRSHARE, FIFO = within_rooms(POLICIES[PolicyName.FAIRSHARE]), within_rooms(POLICIES[PolicyName.FIFO])
PRIORITY = within_rooms(POLICIES[PolicyName.PRIORITY])
GREEDY = [PolicyName.FAIRSHARE, PolicyName.FIFO, PolicyName.PRIORITY]
"""They leave no slot idle that a job can take."""


def confined(job: Demand, *rooms: Room) -> Demand:
    return replace(job, rooms=tuple(sorted(rooms)))


def is_possible(demands: Sequence[Demand], numbers: Sequence[int], num_slots: int) -> bool:
    """Whether the jobs can have so many slots at the same time: no set of them exceeds the slots of all its rooms."""
    if sum(numbers) > num_slots:
        return False
    limited = [
        (demand.rooms, number) for demand, number in zip(demands, numbers, strict=True) if demand.rooms is not None
    ]
    kinds = sorted({rooms for rooms, _ in limited})
    for number in range(1, len(kinds) + 1):
        for some in combinations(kinds, number):
            slots = sum(room.num_slots for room in {room for kind in some for room in kind})
            if sum(num for rooms, num in limited if rooms in some) > slots:
                return False
    return True


class Greedy:
    """What jobs have in the order in which they are served, each as much as can be."""

    def __init__(self, demands: Sequence[Demand], num_slots: int) -> None:
        self.demands = demands
        self.num_slots = num_slots
        self.shares = {demand.job: 0 for demand in demands}

    def can_have(self, job: Demand, number: int) -> bool:
        shares = {**self.shares, job.job: number}
        return is_possible(self.demands, list(shares.values()), self.num_slots)

    def admit(self, order: Iterable[Demand]) -> "Greedy":
        for job in order:
            if job.least <= job.most and self.can_have(job, job.least):
                self.shares[job.job] = job.least
        return self

    def fill(self, order: Iterable[Demand]) -> "Greedy":
        for job in order:
            if self.shares[job.job]:
                self.shares[job.job] = self.most(job)
        return self

    def most(self, job: Demand) -> int:
        return max((n for n in range(job.least, job.most + 1) if self.can_have(job, n)), default=0)


@st.composite
def pools(draw: st.DrawFn, *, least: int = 6, plain: bool = True, ranks: bool = True) -> tuple[list[Demand], int]:
    """Some jobs of which each may use some rooms, or all slots."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    rooms = [Room(name, size) for name, size in zip("abc", sizes, strict=False)]
    num_slots = sum(sizes) + draw(st.integers(0, 4))
    jobs = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        own = draw(st.none() | st.sets(st.sampled_from(rooms), min_size=1))
        limit = num_slots if own is None else sum(room.num_slots for room in own)
        most = min(draw(st.integers(1, 8)), limit)
        job = demand(
            number,
            rank=draw(st.sampled_from([1, 3, 5000, 9000])) if ranks else 5000,
            least=draw(st.integers(1, min(least, most))),
            most=most,
        )
        job = replace(job, rooms=None if own is None else tuple(sorted(own)))
        if not plain:
            job = replace(
                job,
                num_shards=draw(st.none() | st.sampled_from([4, 6, 12, 24])),
                sizes=draw(st.none() | st.sets(st.integers(1, 8), min_size=1).map(lambda sizes: tuple(sorted(sizes)))),
                assigned_workers=draw(st.integers(0, most)),
                tenant=draw(st.sampled_from("xy")),
                due_since=draw(st.sampled_from([inf, inf, 1.0, 2.0])),
            )
            job = replace(job, holds_slots=job.assigned_workers > 0, holding_since=0.0 if job.assigned_workers else inf)
        jobs.append(job)
    return jobs, num_slots


@given(pool=pools(least=1, ranks=False))
def test_fair_shares_are_max_min_fair(pool: tuple[list[Demand], int]) -> None:
    jobs, num_slots = pool
    assume(is_possible(jobs, [1] * len(jobs), num_slots))
    possible = product(*(range(1, job.most + 1) for job in jobs))
    best = max(sorted(shares) for shares in possible if is_possible(jobs, shares, num_slots))
    given = workers(FAIRSHARE(jobs, num_slots))
    assert is_possible(jobs, given, num_slots)
    assert sorted(given) == best


@given(pool=pools())
def test_minimums_are_served_in_order_where_they_fit(pool: tuple[list[Demand], int]) -> None:
    jobs, num_slots = pool
    for name in (PolicyName.FAIRSHARE, PolicyName.PRIORITY, PolicyName.ELASTIC_BATCH):
        served = Greedy(jobs, num_slots).admit(sorted(jobs, key=POLICIES[name].ranking(jobs)))
        given = within_rooms(POLICIES[name])(jobs, num_slots)
        assert {j: bool(t.workers) for j, t in given.items()} == {j: bool(n) for j, n in served.shares.items()}, name


@given(pool=pools())
def test_priorities_are_served_one_after_the_other(pool: tuple[list[Demand], int]) -> None:
    jobs, num_slots = pool
    order = sorted(jobs, key=POLICIES[PolicyName.PRIORITY].ranking(jobs))
    expected = Greedy(jobs, num_slots).admit(order).fill(order).shares
    assert workers(PRIORITY(jobs, num_slots)) == list(expected.values())


@given(pool=pools())
def test_jobs_are_served_in_the_order_of_submission(pool: tuple[list[Demand], int]) -> None:
    jobs, num_slots = pool
    expected = Greedy(jobs, num_slots)
    for job in jobs:
        expected.shares[job.job] = expected.most(job)
    assert workers(FIFO(jobs, num_slots)) == list(expected.shares.values())


def chosen(name: PolicyName, *, preemption: bool, tenants: Mapping[str, TenantShare]) -> Policy:
    """Return a policy as pools use it."""
    policy = POLICIES[name]
    among = within_rooms(by_tenant(policy, tenants, ranking=policy.ranking, attained={}))
    return among if preemption else without_preemption(among, ranking=policy.ranking)


policies = st.builds(
    chosen,
    st.sampled_from(sorted(POLICIES)),
    preemption=st.booleans(),
    tenants=st.sampled_from([{}, {"x": TenantShare(weight=3)}, {"y": TenantShare(quota=3)}]),
)


@given(pool=pools(plain=False), policy=policies)
def test_every_policy_gives_what_jobs_can_have(pool: tuple[list[Demand], int], policy: Policy) -> None:
    jobs, num_slots = pool
    given = policy(jobs, num_slots)
    assert list(given) == [job.job for job in jobs]
    assert is_possible(jobs, workers(given), num_slots)
    for job in jobs:
        num = given[job.job].workers
        assert num in (0, *(size for size in job.sizes or range(1, 9) if job.least <= size <= job.most))


def gains(job: Demand, jobs: Sequence[Demand], targets: Mapping[str, Target], num_slots: int) -> bool:
    """Whether the job could have more slots, if the others have theirs."""
    sizes = [
        n for n in job.sizes or range(1, job.most + 1) if max(job.least, targets[job.job].workers + 1) <= n <= job.most
    ]
    others = {each: target.workers for each, target in targets.items()}
    return any(is_possible(jobs, list({**others, job.job: size}.values()), num_slots) for size in sizes)


@given(pool=pools(plain=False), name=st.sampled_from(GREEDY), has_tenants=st.booleans())
def test_no_slot_is_idle_that_a_job_can_use(
    pool: tuple[list[Demand], int], name: PolicyName, has_tenants: bool
) -> None:
    jobs, num_slots = pool
    if not has_tenants:
        jobs = [replace(job, tenant="x") for job in jobs]
    given = chosen(name, preemption=True, tenants={})(jobs, num_slots)
    assert not [job.job for job in jobs if gains(job, jobs, given, num_slots)]


def test_jobs_that_may_use_every_slot_are_shared_by_the_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resile_scheduler.policies.rooms.Rooms", None)
    jobs = [demand(1), demand(2, rank=9000)]
    assert within_rooms(POLICIES[PolicyName.FAIRSHARE])(jobs, 8) == POLICIES[PolicyName.FAIRSHARE](jobs, 8)


def test_a_policy_that_gives_more_than_there_is_is_not_asked_forever() -> None:
    def too_much(demands: Sequence[Demand], _: int) -> dict[str, Target]:
        return {demand.job: Target(9, "") for demand in demands}

    jobs = [confined(demand(1), A), confined(demand(2), A, B)]
    assert workers(within_rooms(too_much)(jobs, 8)) == [9, 9]


def test_jobs_of_a_scarce_group_share_it_and_others_go_elsewhere() -> None:
    jobs = [confined(demand(n, most=4), A) for n in (1, 2, 3)]
    assert workers(FAIRSHARE([*jobs, demand(4)], 12)) == [2, 1, 1, 8]
    assert workers(FAIRSHARE([jobs[0], demand(2)], 12)) == [4, 8]
    both = [confined(demand(1), A, B), confined(demand(2), B, C), confined(demand(3), B)]
    assert workers(FAIRSHARE(both, 12)) == [4, 4, 4]


def test_a_job_with_fewer_workers_than_its_minimum_counts_with_its_minimum() -> None:
    short = replace(confined(demand(1, least=3, most=4), A), assigned_workers=1, holds_slots=True, holding_since=0.0)
    waiting = confined(demand(2, least=2, most=4), A)
    assert workers(FAIRSHARE([short, waiting, demand(3)], 8)) == [4, 0, 4]


def test_without_preemption_only_slots_that_a_due_job_can_use_are_kept_for_it() -> None:
    policy = without_preemption(FAIRSHARE)
    running = replace(confined(demand(1, most=3), A), assigned_workers=3, holds_slots=True, holding_since=0.0)
    other = replace(demand(2, most=3), assigned_workers=3, holds_slots=True, holding_since=0.0)
    due = replace(confined(demand(3, least=4, most=4), A), due_since=1.0)
    jobs = [running, other, due, confined(demand(4, most=1), A), confined(demand(5), B)]
    assert workers(policy(jobs, 8)) == [3, 3, 0, 0, 1]
    again = [running, other, due, replace(confined(demand(4, least=2), B), due_since=2.0), confined(demand(5), B)]
    assert workers(policy(again, 8)) == [3, 3, 0, 0, 0], "what is left is kept for the next one"
