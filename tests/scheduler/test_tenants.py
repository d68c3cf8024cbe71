"""Slots are divided among tenants first: quotas, weights, lending, and what stays as it is with one tenant."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.policies.demand import Demand, Policy, RankedPolicy, Target
from resile_scheduler.policies.preemption import without_preemption
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.policies.tenants import by_tenant
from resile_shared.messages.pool import TenantShare
from resile_shared.policies import PolicyName

from .test_policies import demand, demands, keeps, possible, workers

Shares = Mapping[str, TenantShare]
GREEDY = (PolicyName.FAIRSHARE, PolicyName.FIFO, PolicyName.PRIORITY)


def composed(
    policy: RankedPolicy, shares: Shares, *, preemption: bool = True, attained: Mapping[str, float] | None = None
) -> Policy:
    among = by_tenant(policy, shares, ranking=policy.ranking, attained=attained or {})
    return among if preemption else without_preemption(among, ranking=policy.ranking)


def of(tenant: str, job: Demand) -> Demand:
    return replace(job, tenant=tenant)


def fair(jobs: list[Demand], num_slots: int, **shares: TenantShare) -> dict[str, Target]:
    return composed(POLICIES[PolicyName.FAIRSHARE], shares)(jobs, num_slots)


def quota(slots: int, *, weight: int = 1) -> TenantShare:
    return TenantShare(weight=weight, quota=slots)


def total(targets: Mapping[str, Target], jobs: list[Demand], tenant: str) -> int:
    return sum(targets[job.job].workers for job in jobs if job.tenant == tenant)


def gang(job: Demand) -> Demand:
    return replace(
        job,
        least=job.most,
        sizes=None,
        num_shards=None,
        holds_slots=True,
        assigned_workers=job.most,
        is_preemptible=False,
    )


@st.composite
def of_tenants(draw: st.DrawFn) -> list[Demand]:
    return [of(draw(st.sampled_from("abc")), job) for job in draw(demands())]


@st.composite
def with_gangs(draw: st.DrawFn) -> list[Demand]:
    """Jobs of tenants, of which some are gangs that have started: they may hold more slots than the pool has left."""
    return [gang(job) if draw(st.booleans()) else job for job in draw(of_tenants())]


weights = st.integers(1, 5)
some_shares = st.dictionaries(st.sampled_from("abcd"), st.builds(quota, st.integers(0, 8), weight=weights))
weighted = st.dictionaries(st.sampled_from("abcd"), st.tuples(weights, st.integers(1, 24)), min_size=2)
"""Weights of tenants, and how many slots the job of each can use."""
names = st.sampled_from(sorted(POLICIES))
slots = st.integers(0, 24)


def test_tenants_share_equally_however_many_jobs_each_has() -> None:
    jobs = [of("a", demand(1)), *(of("b", demand(n)) for n in range(2, 9))]
    targets = fair(jobs, 8)
    assert workers(targets) == [4, 1, 1, 1, 1, 0, 0, 0]
    assert targets["job-1"].reason == "tenant a has 4 of 8 slots"
    assert targets["job-2"].reason == "fair share with job-3, job-4, job-5; tenant b has 4 of 8 slots"
    waiting = "waiting for a slot: the minimums of job-2, job-3, job-4 and 1 more leave fewer"
    assert targets["job-6"].reason == f"{waiting}; tenant b has 4 of 8 slots"


def test_shares_of_tenants_follow_their_weights() -> None:
    jobs = [of("a", demand(1)), of("b", demand(2))]
    assert workers(fair(jobs, 9, b=TenantShare(weight=2))) == [3, 6]


def test_a_quota_is_served_first_and_borrowed_while_its_tenant_does_not_use_it() -> None:
    jobs = [of("a", demand(1)), of("b", demand(2))]
    assert workers(fair(jobs, 8, b=quota(6))) == [2, 6]
    assert workers(fair(jobs[:1], 8, b=quota(6))) == [8], "nobody of tenant b wants it"
    assert workers(fair([jobs[0], of("b", demand(2, most=3))], 8, b=quota(6))) == [5, 3], "as much as it can use"
    assert workers(fair(jobs, 8, b=quota(2))) == [4, 4], "a quota is a least, not a most"


def test_a_quota_is_given_back_by_jobs_that_started_on_it() -> None:
    running = [replace(of("a", demand(n, least=4)), holds_slots=True, assigned_workers=4) for n in (1, 2)]
    assert workers(fair([*running, of("b", demand(3))], 8, b=quota(4))) == [4, 0, 4]


def test_quotas_that_the_pool_has_lost_the_slots_for_are_reduced_in_proportion_and_say_so() -> None:
    jobs = [of("a", demand(1)), of("b", demand(2)), of("c", demand(3))]
    targets = fair(jobs, 6, a=quota(8), b=quota(4))
    assert workers(targets) == [4, 2, 0]
    assert targets["job-1"].reason == (
        "tenant a has 4 of 6 slots, and its quota of 8 is reduced to 4: the quotas exceed the slots"
    )
    assert targets["job-3"].reason == "waiting for a slot: tenant c has 0 of 6 slots"


def test_a_minimum_above_the_share_of_its_tenant_is_served_if_it_fits_beside_the_others() -> None:
    jobs = [of("a", demand(1, least=6)), of("b", demand(2))]
    assert workers(fair(jobs, 8)) == [6, 2]
    targets = fair(jobs, 8, b=quota(4))
    assert workers(targets) == [0, 8], "not beside the quota of another tenant; the slots are lent"
    assert targets["job-1"].reason == "waiting for 6 slots: tenant a has 0 of 8 slots"


def test_of_tenants_whose_minimums_do_not_all_fit_the_one_that_attained_least_for_its_weight_is_first() -> None:
    jobs = [of(name, demand(n, least=3)) for n, name in enumerate("abc", start=1)]
    for weight, served in ((1, [False, True, True]), (10, [True, True, False])):
        shares = {"a": TenantShare(weight=weight)}
        policy = composed(POLICIES[PolicyName.FAIRSHARE], shares, attained={"a": 90.0, "b": 10.0, "c": 30.0})
        assert [bool(n) for n in workers(policy(jobs, 6))] == served


def test_a_tenant_that_has_waited_long_comes_before_those_that_got_slots_since() -> None:
    held = replace(of("a", demand(1, least=5)), holds_slots=True, assigned_workers=8, holding_since=100.0)
    waiting = of("b", demand(2, least=5))
    assert workers(fair([held, waiting], 8)) == [8, 0]
    assert workers(fair([held, replace(waiting, due_since=101.0)], 8)) == [8, 0]
    assert workers(fair([held, replace(waiting, due_since=99.0)], 8)) == [0, 8]


def test_a_job_that_is_due_gives_no_turn_to_those_that_the_policy_serves_before_it() -> None:
    first, due = of("a", demand(1, rank=9000)), replace(of("a", demand(2)), due_since=10.0)
    other = replace(of("b", demand(3)), due_since=20.0)
    policy = composed(POLICIES[PolicyName.PRIORITY], {})
    assert workers(policy([first, due, other], 1)) == [0, 0, 1], "job-1 would get the slot, and has just come"
    assert workers(policy([due, other], 1)) == [1, 0]
    assert workers(policy([replace(first, least=2), due, other], 1)) == [0, 1, 0], "there is no room for job-1"


def test_a_job_that_is_due_takes_no_slots_from_the_jobs_that_had_them_before_whatever_their_tenants_wait_for() -> None:
    held = [replace(of(name, demand(n)), holds_slots=True, holding_since=5.0) for n, name in enumerate("ab", start=1)]
    due = [replace(of("b", demand(3, least=2, rank=9000)), due_since=7.0), replace(of("c", demand(4)), due_since=9.0)]
    for name in PolicyName:
        assert workers(composed(POLICIES[name], {}, attained={"b": 1.0})([*held, *due], 2)) == [1, 1, 0, 0]


def test_what_one_tenants_policy_cannot_use_is_lent_to_the_others() -> None:
    jobs = [of("a", demand(1, least=4, most=4)), of("a", demand(2, least=4, most=4)), of("b", demand(3))]
    assert workers(fair(jobs, 12)) == [4, 0, 8]


def test_what_one_tenant_leaves_is_divided_among_the_others_by_weight() -> None:
    jobs = [*(of("a", demand(n, least=3, most=3)) for n in (1, 2)), of("b", demand(3)), of("c", demand(4))]
    assert workers(fair(jobs, 15)) == [3, 0, 6, 6], "five would be a third"


def test_with_preemption_off_a_quota_is_given_back_only_as_slots_become_free() -> None:
    policy = composed(POLICIES[PolicyName.FAIRSHARE], {"b": quota(6)}, preemption=False)
    running = replace(of("a", demand(1)), holds_slots=True, assigned_workers=6)
    assert workers(policy([running, of("b", demand(2))], 8)) == [6, 2]


@given(jobs=demands(), num_slots=slots, name=names, shares=some_shares)
def test_with_one_tenant_nothing_changes(jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares) -> None:
    jobs = [of("a", job) for job in jobs]
    assert composed(POLICIES[name], shares)(jobs, num_slots) == POLICIES[name](jobs, num_slots)


@given(jobs=of_tenants(), num_slots=slots, name=names, shares=some_shares, preemption=st.booleans())
def test_never_more_than_there_is_and_always_a_whole_minimum(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares, preemption: bool
) -> None:
    targets = composed(POLICIES[name], shares, preemption=preemption)(jobs, num_slots)
    assert list(targets) == [job.job for job in jobs]
    assert sum(workers(targets)) <= num_slots
    for job in jobs:
        assert targets[job.job].workers in (0, *possible(job))
        assert targets[job.job].reason


@settings(max_examples=200)
@given(jobs=with_gangs(), num_slots=slots, name=names, shares=some_shares, preemption=st.booleans())
def test_gangs_keep_what_they_have_as_far_as_the_slots_suffice(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares, preemption: bool
) -> None:
    targets = composed(POLICIES[name], shares, preemption=preemption)(jobs, num_slots)
    assert sum(workers(targets)) <= num_slots
    gangs = [job for job in jobs if not job.is_preemptible]
    if sum(job.least for job in gangs) <= num_slots:
        assert all(targets[job.job].workers == job.least for job in gangs)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_gangs_of_two_tenants_may_hold_more_slots_than_a_pool_that_lost_a_host_has(name: PolicyName) -> None:
    gangs = [gang(of(tenant, demand(number, most=2))) for number, tenant in enumerate("ab", start=1)]
    targets = composed(POLICIES[name], {})([*gangs, of("c", demand(3))], 2)
    assert workers(targets) == [2, 0, 0]


@settings(max_examples=300)
@given(jobs=of_tenants(), num_slots=slots, name=st.sampled_from(GREEDY), shares=some_shares, preemption=st.booleans())
def test_no_slot_is_idle_while_a_job_of_any_tenant_can_take_it(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares, preemption: bool
) -> None:
    targets = composed(POLICIES[name], shares, preemption=preemption)(jobs, num_slots)
    idle = num_slots - sum(workers(targets))
    for job in jobs:
        got = targets[job.job].workers
        assert not any(got < size <= got + idle for size in possible(job))


@settings(max_examples=300)
@given(jobs=of_tenants(), num_slots=slots, name=names, shares=some_shares)
def test_a_tenant_has_its_quota_as_far_as_its_jobs_can_use_it(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares
) -> None:
    if sum(share.quota for share in shares.values()) > num_slots:
        return
    targets = composed(POLICIES[name], shares)(jobs, num_slots)
    for tenant, share in shares.items():
        own = [job for job in jobs if job.tenant == tenant]
        alone = POLICIES[name](own, min(share.quota, num_slots))
        assert total(targets, jobs, tenant) >= sum(workers(alone))


@settings(max_examples=300)
@given(
    num_slots=slots, share=st.dictionaries(st.sampled_from("abcd"), st.tuples(weights, st.integers(1, 24)), min_size=2)
)
def test_shares_of_tenants_are_within_a_slot_of_the_ideal(num_slots: int, share: dict[str, tuple[int, int]]) -> None:
    """No slot could move from one tenant to another and leave both nearer to a common level."""
    jobs = [of(name, demand(n, most=most)) for n, (name, (_, most)) in enumerate(share.items(), start=1)]
    targets = fair(jobs, num_slots, **{name: TenantShare(weight=weight) for name, (weight, _) in share.items()})
    for rich in jobs:
        for poor in jobs:
            has, lacks = targets[rich.job].workers, targets[poor.job].workers
            if has > 1 and lacks < poor.most:
                assert Fraction(has - 1, share[rich.tenant][0]) < Fraction(lacks + 1, share[poor.tenant][0])


@given(jobs=of_tenants(), num_slots=slots, name=names, shares=some_shares, data=st.data())
def test_the_order_in_which_jobs_are_given_does_not_matter(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares, data: st.DataObject
) -> None:
    policy = composed(POLICIES[name], shares)
    assert policy(data.draw(st.permutations(jobs)), num_slots) == policy(jobs, num_slots)


@given(jobs=of_tenants(), num_slots=slots, name=st.sampled_from(GREEDY), shares=some_shares)
def test_decided_again_nothing_moves(jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares) -> None:
    policy = composed(POLICIES[name], shares)
    jobs = [replace(job, holds_slots=False, assigned_workers=0) for job in jobs]
    given = policy(jobs, num_slots)
    later = [replace(j, holds_slots=n > 0, assigned_workers=n) for j in jobs for n in (given[j.job].workers,)]
    assert workers(policy(later, num_slots)) == workers(given)


@given(jobs=of_tenants(), num_slots=slots, name=names, shares=some_shares)
def test_without_preemption_no_tenant_takes_from_another_one(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares
) -> None:
    targets = composed(POLICIES[name], shares, preemption=False)(jobs, num_slots)
    kept = {job.job: keeps(job) for job in jobs if job.holds_slots}
    if sum(kept.values()) <= num_slots:
        assert all(targets[job].workers >= kept[job] for job in kept)


@pytest.mark.parametrize("name", GREEDY)
def test_many_tenants_are_quick(name: PolicyName) -> None:
    jobs = [of(f"tenant-{n % 50}", demand(n, rank=n, most=50)) for n in range(1, 501)]
    targets = composed(POLICIES[name], {})(jobs, 2000)
    assert sum(workers(targets)) == 2000
