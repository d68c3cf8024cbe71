"""Tenants with caps: their jobs never hold more slots together, whatever the policy and whatever happens to hosts."""

from collections import Counter
from collections.abc import Mapping

import hypothesis.strategies as st
from hypothesis import given, settings

from resile_scheduler.core.events import TenantChangeRequested
from resile_scheduler.policies.caps import within_caps
from resile_scheduler.policies.demand import Demand, Policy
from resile_scheduler.policies.preemption import without_preemption
from resile_scheduler.policies.rooms import within_rooms
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.policies.tenants import by_tenant
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import Accepted, PoolPolicy, Refused, TenantSet
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobSpec, JobState
from resile_shared.policies import PolicyName

from .checks import Checker
from .test_policies import demand, possible, workers
from .test_simulator import spec
from .test_tenant_shares import answer, bench
from .test_tenants import GREEDY, Shares, names, of, of_tenants, slots, some_shares, total, with_gangs

some_caps = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1)
CAP = 3


def capped(
    name: PolicyName, caps: Mapping[str, int], shares: Shares | None = None, *, preemption: bool = True
) -> Policy:
    """Return a policy as pools use it."""
    policy = POLICIES[name]
    among = within_rooms(by_tenant(policy, shares or {}, ranking=policy.ranking, attained={}))
    return within_caps(among if preemption else without_preemption(among, ranking=policy.ranking), caps)


def test_a_cap_leaves_slots_free_and_says_so() -> None:
    jobs = [of("a", demand(1)), of("a", demand(2)), of("a", demand(3, least=4))]
    targets = capped(PolicyName.FAIRSHARE, {"a": 3})(jobs, 8)
    assert workers(targets) == [2, 1, 0]
    assert targets["job-1"].reason == "tenant a may hold 3 slots at most"
    assert targets["job-3"].reason == "waiting for 4 slots: tenant a may hold 3 slots at most"


def test_what_a_cap_leaves_goes_to_other_tenants() -> None:
    jobs = [of("a", demand(1)), of("b", demand(2)), of("c", demand(3))]
    assert workers(capped(PolicyName.FAIRSHARE, {"a": 1, "b": 3})(jobs, 9)) == [1, 3, 5]


@settings(max_examples=300)
@given(jobs=with_gangs(), num_slots=slots, name=names, shares=some_shares, caps=some_caps, preemption=st.booleans())
def test_no_tenant_gets_more_than_its_cap_whatever_the_policy(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares, caps: Mapping[str, int], preemption: bool
) -> None:
    targets = capped(name, caps, shares, preemption=preemption)(jobs, num_slots)
    assert list(targets) == [job.job for job in jobs]
    assert sum(workers(targets)) <= num_slots
    for tenant, cap in caps.items():
        kept = sum(job.least for job in jobs if job.tenant == tenant and not job.is_preemptible)
        assert total(targets, jobs, tenant) <= max(cap, kept)
    for job in jobs:
        assert targets[job.job].workers in (0, *possible(job))
        assert targets[job.job].reason


@settings(max_examples=200)
@given(jobs=of_tenants(), num_slots=slots, name=names, shares=some_shares)
def test_a_cap_that_is_not_reached_changes_nothing(
    jobs: list[Demand], num_slots: int, name: PolicyName, shares: Shares
) -> None:
    caps = dict.fromkeys("abc", num_slots or 1)
    assert capped(name, caps, shares)(jobs, num_slots) == capped(name, {}, shares)(jobs, num_slots)


@settings(max_examples=300)
@given(jobs=of_tenants(), num_slots=slots, name=st.sampled_from(GREEDY), caps=some_caps)
def test_no_slot_is_idle_that_a_job_of_another_tenant_can_take(
    jobs: list[Demand], num_slots: int, name: PolicyName, caps: Mapping[str, int]
) -> None:
    targets = capped(name, caps)(jobs, num_slots)
    idle = num_slots - sum(workers(targets))
    for job in jobs:
        if job.tenant not in caps:
            got = targets[job.job].workers
            assert not any(got < size <= got + idle for size in possible(job))


jobs_of_tenants = st.builds(
    lambda tenant, least, extra, iterations, time: (
        time,
        spec(least=least, most=least + extra, tenant=tenant),
        Sharded(iterations),
    ),
    st.sampled_from("ab"),
    st.integers(1, CAP),
    st.integers(0, 4),
    st.integers(20, 200),
    st.floats(0, 10),
)


@settings(max_examples=30, deadline=None)
@given(jobs=st.lists(jobs_of_tenants, min_size=2, max_size=6), name=names, moves=st.lists(st.floats(1, 20), max_size=3))
def test_memberships_of_a_tenant_never_exceed_its_cap_while_jobs_come_and_hosts_are_drained(
    jobs: list[tuple[float, JobSpec, Sharded]], name: PolicyName, moves: list[float]
) -> None:
    sim = SimulatedPool(policies=POLICIES, chosen=PoolPolicy(policy=name))
    for host in ("host-1", "host-2"):
        sim.add_host(host, 4)
    sim.handle(TenantChangeRequested("cap", TenantSet(tenant_id="a", cap=CAP)))
    checker = Checker(sim)

    def check() -> None:
        checker.check()
        held = Counter[str]()
        for job in sim.scheduler._pool.jobs.values():
            if not job.is_over:
                held[job.record.spec.tenant] += max(len(job.held), len(job.generations.active))
        assert held["a"] <= CAP

    sim.submit([Submission(time, f"job-{n}", wish, training) for n, (time, wish, training) in enumerate(jobs, 1)])
    for time in moves:
        sim.later(time, lambda: sim.change_host("host-2", HostState.DRAINING))
        sim.later(time + 3, lambda: sim.change_host("host-2", HostState.UP))
    sim.run(watch=check)
    assert all(record.state is JobState.COMPLETED for record in sim.records.values()), sim.scheduler.explain()


def test_a_cap_below_the_quota_is_refused_and_zero_removes_it() -> None:
    pool = bench()

    def change(number: int, **share: int) -> Accepted | Refused:
        request = TenantSet(tenant_id="a", **share)
        return answer(pool.tell_once(TenantChangeRequested(f"change-{number}", request)))

    assert change(1, quota=4, cap=6) == Accepted()
    for number, share in enumerate(({"cap": 3}, {"quota": 7}), 2):
        refused = change(number, **share)
        assert isinstance(refused, Refused)
        assert refused.reason.startswith("a quota of ")
        assert "exceeds the cap of " in refused.reason
    assert change(4, cap=0) == Accepted()
    assert change(5, quota=7) == Accepted()
