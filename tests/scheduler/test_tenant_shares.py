"""Tenants are configured while jobs train: stored, kept by later schedulers, and refused if it cannot be."""

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import Command, Reply, StateRestored, StoreTenants, TenantChangeRequested
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import Accepted, Refused, TenantDelete, TenantSet
from resile_shared.messages.hosts import HostState
from resile_shared.messages.pool import MAX_TENANTS, TenantShare, TenantsRecord

from .checks import Checker
from .test_core import Bench
from .test_simulator import spec


def configure(
    number: int, tenant: str, *, weight: int | None = None, quota: int | None = None
) -> TenantChangeRequested:
    return TenantChangeRequested(f"change-{number}", TenantSet(tenant_id=tenant, weight=weight, quota=quota))


def delete(number: int, tenant: str) -> TenantChangeRequested:
    return TenantChangeRequested(f"change-{number}", TenantDelete(tenant_id=tenant))


def stored(commands: list[Command]) -> list[TenantsRecord]:
    return [command.record for command in commands if isinstance(command, StoreTenants)]


def answer(commands: list[Command]) -> Accepted | Refused:
    (reply,) = [command for command in commands if isinstance(command, Reply)]
    return reply.answer


def bench() -> Bench:
    bench = Bench(8)
    bench.scheduler = Scheduler(policies=POLICIES)
    bench.tell(StateRestored())
    bench.host("host-1", 8)
    return bench


def test_jobs_follow_a_change_at_their_next_boundary_and_a_quota_that_is_borrowed_is_given_back() -> None:
    sim = SimulatedPool(policies=POLICIES)
    checker = Checker(sim)
    sim.add_host("host-1", 4)
    sim.add_host("host-2", 4)
    sim.submit(
        [
            Submission(0, "job-1", spec(tenant="a"), Sharded(10_000)),
            Submission(4, "job-2", spec(tenant="b"), Sharded(10_000)),
        ]
    )
    sim.handle(configure(1, "b", quota=6))
    sim.run(until=3, watch=checker.check)
    assert len(sim.members("job-1")) == 8, "nobody else wants the quota"
    sim.run(until=8, watch=checker.check)
    assert [len(sim.members(job)) for job in ("job-1", "job-2")] == [2, 6]
    assert sim.scheduler.explain()["job-1"] == "tenant a has 2 of 8 slots"
    sim.restart_scheduler()
    sim.send_heartbeats()
    sim.handle(configure(2, "a", weight=3))
    sim.handle(configure(3, "b", quota=0))
    sim.run(until=12, watch=checker.check)
    assert [len(sim.members(job)) for job in ("job-1", "job-2")] == [6, 2]
    sim.handle(delete(4, "a"))
    sim.run(until=16, watch=checker.check)
    assert [len(sim.members(job)) for job in ("job-1", "job-2")] == [4, 4]
    reasons = [item.reason for item in sim.histories["job-2"] if item.kind == "allocation"]
    assert reasons == ["start", "tenant b changed", "tenant a deleted"]


def test_a_change_is_stored_before_it_is_answered_and_takes_effect_once() -> None:
    pool = bench()
    first = configure(1, "vision", weight=2, quota=3)
    commands = pool.tell_once(first)
    (record,) = stored(commands)
    assert record.tenants == {"vision": TenantShare(weight=2, quota=3)}
    assert (record.number, record.tenant, answer(commands)) == (1, "vision", Accepted())
    kinds = [type(command) for command in commands]
    assert kinds.index(StoreTenants) < kinds.index(Reply)
    (record,) = stored(pool.tell_once(delete(2, "vision")))
    assert (record.tenants, record.number) == ({}, 2)
    assert (pool.tell(first), pool.tell(delete(2, "vision"))) == (
        [Reply("change-1", Accepted())],
        [Reply("change-2", Accepted())],
    )
    pool.scheduler = Scheduler(epoch=2, policies=POLICIES)
    pool.tell(StateRestored(hosts=tuple(pool.hosts.values()), tenants=record))
    assert stored(pool.tell_once(first)) == []


def test_a_quota_counts_the_slots_of_drained_hosts() -> None:
    pool = bench()
    pool.host("host-1", 8, state=HostState.DRAINING)
    assert answer(pool.tell_once(configure(1, "a", quota=5))) == Accepted()
    refused = answer(pool.tell_once(configure(2, "a", quota=9)))
    assert isinstance(refused, Refused)
    assert "it has 8 slots" in refused.reason


def test_quotas_that_exceed_the_pool_are_refused_and_change_nothing() -> None:
    pool = bench()
    assert answer(pool.tell_once(configure(1, "a", quota=5))) == Accepted()
    refused = answer(pool.tell_once(configure(2, "b", quota=4)))
    assert refused == Refused(
        code="invalid",
        reason="a quota of 4 exceeds the pool: it has 8 slots, of which other tenants have quotas for 5; "
        "choose a smaller quota, or a weight",
    )
    assert answer(pool.tell_once(configure(3, "b", quota=3))) == Accepted()
    assert answer(pool.tell_once(configure(4, "a", quota=8))) != Accepted(), "beside the others"
    assert answer(pool.tell_once(configure(5, "a", weight=9))) == Accepted()


def test_after_the_pool_has_shrunk_a_quota_may_be_kept_or_lowered_but_not_raised() -> None:
    pool = Bench(8)
    pool.scheduler = Scheduler(policies=POLICIES)
    pool.tell(StateRestored(tenants=TenantsRecord(tenants={"a": TenantShare(quota=8)})))
    pool.host("host-1", 4)
    assert answer(pool.tell_once(configure(1, "a", weight=2))) == Accepted()
    assert answer(pool.tell_once(configure(2, "a", quota=7))) == Accepted()
    assert answer(pool.tell_once(configure(3, "a", quota=8))) != Accepted()


def test_a_tenant_that_is_not_configured_cannot_be_deleted() -> None:
    reason = "tenant nobody is not configured: `resile tenant list` lists those that are"
    assert answer(bench().tell_once(delete(1, "nobody"))) == Refused(code="unknown", reason=reason)


def test_a_change_to_what_holds_already_is_no_event() -> None:
    pool = bench()
    pool.tell_once(configure(1, "a", weight=2))
    (record,) = stored(pool.tell_once(configure(2, "a", weight=2)))
    assert (record.number, record.applied_commands) == (1, ("change-1", "change-2"))


def test_there_are_never_more_tenants_than_a_record_holds() -> None:
    pool = Bench(8)
    pool.scheduler = Scheduler(policies=POLICIES)
    pool.tell(StateRestored(tenants=TenantsRecord(tenants={f"t-{n}": TenantShare() for n in range(MAX_TENANTS)})))
    refused = answer(pool.tell_once(configure(1, "one-more", weight=2)))
    assert isinstance(refused, Refused)
    assert "delete one first" in refused.reason
    assert answer(pool.tell_once(configure(2, "t-1", weight=2))) == Accepted()
