"""What jobs and tenants have used is counted once, whatever restarts, is deleted or arrives when."""

from collections.abc import Mapping
from types import MappingProxyType

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import (
    Event,
    JobChangeRequested,
    JobRemoved,
    RemoveJob,
    StateRestored,
    StoreJob,
    StoreUsage,
    Tick,
)
from resile_scheduler.policies.ranking import PATIENCE_SECONDS
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workers import Delays
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import JobDelete, JobPause, JobResume, JobStop
from resile_shared.messages.hosts import Heartbeat
from resile_shared.messages.jobs import JobState
from resile_shared.messages.message import at
from resile_shared.messages.usage import MAX_COUNTED, RemovedUsage, used_since

from .checks import Checker
from .test_core import Bench
from .test_simulator import spec


class Meter:
    """Measures what jobs hold by looking at each moment: the slots of jobs that have not ended."""

    def __init__(self, sim: SimulatedPool) -> None:
        self.sim = sim
        self.used: dict[str, float] = {}
        self._held: list[str] = []
        self._since = sim.now

    def look(self) -> None:
        for job in self._held:
            self.used[job] = self.used.get(job, 0.0) + self.sim.now - self._since
        self._since = self.sim.now
        over = {job for job, record in self.sim.records.items() if record.state.is_final}
        self._held = [job for job in self.sim.scheduler.holders().values() if job not in over]


def counted(sim: SimulatedPool) -> dict[str, float]:
    """Slot-seconds by tenant, by what is stored."""
    now = at(sim.now)
    removed = sim.removed_usage.values()
    in_removed = {job for usage in removed for job in usage.jobs}
    used = [(usage.tenant, usage.used) for usage in removed]
    used += [(r.spec.tenant, r.usage) for r in sim.records.values() if r.job not in in_removed]
    total: dict[str, float] = {}
    for tenant, usage in used:
        total[tenant] = total.get(tenant, 0.0) + used_since(usage, None, now=now) / 1000
    return total


def pool() -> SimulatedPool:
    sim = SimulatedPool(policies=POLICIES)
    sim.add_host("host-1", 4)
    sim.add_host("host-2", 4)
    return sim


def test_slots_count_from_the_allocation_until_they_are_released() -> None:
    sim = pool()
    sim.submit([Submission(0, "job-1", spec(most=2), Sharded(10_000))])
    sim.run(until=100)
    assert counted(sim) == {"default": 200.0}
    sim.handle(JobChangeRequested("pause", JobPause(job_id="job-1")))
    sim.run(until=110)
    assert sim.records["job-1"].usage.slots == 0
    paused = counted(sim)["default"]
    assert 200.0 < paused < 204.0, "until the checkpoint was saved"
    sim.run(until=200)
    sim.handle(JobChangeRequested("resume", JobResume(job_id="job-1")))
    assert counted(sim) == {"default": paused}, "nothing while it was paused"


actions = st.lists(
    st.tuples(
        st.floats(0, 40), st.sampled_from(["restart", "pause", "resume", "stop", "delete", "crash"]), st.integers(1, 4)
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(actions=actions, lengths=st.lists(st.integers(5, 300), min_size=1, max_size=4))
def test_every_slot_second_is_counted_once(actions: list[tuple[float, str, int]], lengths: list[int]) -> None:
    sim = pool()
    checker, meter = Checker(sim), Meter(sim)
    tenants = {f"job-{n}": "ab"[n % 2] for n in range(1, 5)}
    sim.submit(
        Submission(2.0 * n, f"job-{n}", spec(tenant=tenants[f"job-{n}"]), Sharded(length))
        for n, length in enumerate(lengths, start=1)
    )

    def act(number: int, what: str, which: int) -> None:
        job = f"job-{which}"
        requests = {"pause": JobPause, "resume": JobResume, "stop": JobStop, "delete": JobDelete}
        if what == "restart":
            sim.restart_scheduler()
            sim.send_heartbeats()
        elif what == "crash":
            sim.crash("host-2")
        else:
            sim.handle(JobChangeRequested(f"{what}-{number}", requests[what](job_id=job)))

    for number, (time, what, which) in enumerate(actions):
        sim.later(time, lambda n=number, w=what, j=which: act(n, w, j))  # type: ignore[misc]
    sim.run(until=60, watch=lambda: (meter.look(), checker.check()))
    meter.look()
    measured: dict[str, float] = {}
    for job, seconds in meter.used.items():
        measured[tenants[job]] = measured.get(tenants[job], 0.0) + seconds
    found = counted(sim)
    for tenant, seconds in measured.items():
        assert abs(found.get(tenant, 0.0) - seconds) < 0.1, "apart from the rounding to milliseconds"


def shrinking(*restarts: float, silent: Mapping[str, float] = MappingProxyType({})) -> SimulatedPool:
    """Two workers of the first job leave at 10 s, and are gone 5 s later; the scheduler restarts at ``restarts``.

    No heartbeat arrives of those hosts that are ``silent``, from 12 s on until the time given.
    """
    sim = SimulatedPool(policies=POLICIES, delays=Delays(exit=5.0))
    sim.add_host("host-1", 4)
    sim.add_host("host-2", 1, device_class="other")
    sim.submit(Submission(10.0 * n, f"job-{n + 1}", spec(tenant="ab"[n], most=4), Sharded(10**6)) for n in range(2))

    def is_lost(event: Event) -> bool:
        return isinstance(event, Heartbeat) and 12 <= sim.now - sim.start < silent.get(event.host, 0)

    sim.channel = lambda event: () if is_lost(event) else (event,)
    for time in restarts:
        sim.later(time, sim.restart_scheduler)
    for time in range(1, 60):
        sim.run(until=time)
        sim.send_heartbeats()
    return sim


def test_workers_that_leave_while_the_scheduler_restarts_are_counted_until_they_are_gone() -> None:
    undisturbed = counted(shrinking())
    assert counted(shrinking(12.5)) == undisturbed
    assert counted(shrinking(12.5, 13.5)) == undisturbed


def test_a_worker_is_counted_once_though_another_host_has_not_said_which_workers_it_has() -> None:
    assert counted(shrinking(12.5, silent={"host-2": 14})) == counted(shrinking())


def test_workers_that_ended_while_no_scheduler_led_are_counted_until_it_is_known() -> None:
    sim = shrinking(12.5, silent={"host-1": 18, "host-2": 20})
    assert counted(sim)["a"] == pytest.approx(4 * 20 + 2 * 39)
    assert sim.records["job-1"].usage.slots == 2


def test_what_jobs_use_and_how_long_they_wait_is_counted_though_the_clock_was_set_back() -> None:
    sim = SimulatedPool(policies=POLICIES)
    sim.add_host("host-1", 4)
    jobs = [Submission(n, f"job-{n + 1}", spec(least=4, most=4), Sharded(10**6)) for n in range(2)]
    sim.submit(jobs)
    sim.run(until=100)
    before = [record.model_copy(deep=True) for record in sim.records.values()]
    scheduler, now = Scheduler(epoch=9), sim.now - 36_000
    hosts, allocations = tuple(sim.hosts.values()), tuple({a.job: a for a in sim.allocations}.values())
    stored = StateRestored(jobs=tuple(before), hosts=hosts, allocations=allocations, last_number=2)
    commands = scheduler.handle(stored, now=now)
    records = {command.record.job: command.record for command in commands if isinstance(command, StoreJob)}
    assert used_since(records["job-1"].usage, None, now=at(now + 10)) == 40_000
    assert records["job-1"].holding_since == at(now)
    assert records["job-2"].waiting_since == at(now), "so it is due in ten minutes, not in ten hours"


def test_what_a_deleted_job_has_used_stays_with_its_tenant() -> None:
    sim = pool()
    sim.submit([Submission(0, "job-1", spec(most=2, tenant="a"), Sharded(10))])
    sim.run(until=100)
    assert sim.records["job-1"].state is JobState.COMPLETED
    used = counted(sim)
    assert used["a"] > 0
    sim.handle(JobChangeRequested("delete", JobDelete(job_id="job-1")))
    assert counted(sim) == used, "while it is removed"
    sim.run(until=101)
    assert "job-1" not in sim.records
    assert counted(sim) == used
    assert sim.removed_usage["a"].jobs == (), "nobody will count it again"
    sim.restart_scheduler()
    assert counted(sim) == used


def test_a_job_is_counted_once_wherever_its_removal_was_interrupted() -> None:
    sim = pool()
    sim.submit([Submission(0, "job-1", spec(most=2, tenant="a"), Sharded(10))])
    sim.run(until=100)
    record, used = sim.records["job-1"], counted(sim)["a"]
    bench = Bench(4)
    commands = bench.scheduler.handle(StateRestored(jobs=(record,)), now=sim.now)
    commands = bench.scheduler.handle(JobChangeRequested("delete", JobDelete(job_id="job-1")), now=sim.now)
    (removed,) = [command.usage for command in commands if isinstance(command, StoreUsage)]
    assert (removed.jobs, removed.used.slot_milliseconds / 1000) == (("job-1",), used)
    deleted = record.model_copy(update={"is_deleted": True})
    for stored, usage in (((record,), (removed,)), ((deleted,), ()), ((deleted,), (removed,))):
        scheduler = Scheduler(epoch=2)
        commands = scheduler.handle(StateRestored(jobs=stored, removed_usage=usage), now=sim.now)
        commands += scheduler.handle(JobChangeRequested("again", JobDelete(job_id="job-1")), now=sim.now)
        assert any(isinstance(command, RemoveJob) for command in commands)
        kinds = [type(command) for command in commands]
        assert StoreUsage not in kinds or kinds.index(StoreUsage) < kinds.index(RemoveJob)
        newest = [*usage, *(command.usage for command in commands if isinstance(command, StoreUsage))][-1]
        assert newest == removed
        (forgotten,) = [
            c.usage for c in scheduler.handle(JobRemoved("job-1"), now=sim.now) if isinstance(c, StoreUsage)
        ]
        assert forgotten == removed.model_copy(update={"jobs": ()})
    (pruned,) = Scheduler(epoch=2).handle(StateRestored(removed_usage=(removed,)), now=sim.now)
    assert pruned == StoreUsage(removed.model_copy(update={"jobs": ()})), "its record is gone"


def test_the_usage_of_more_tenants_than_there_is_room_for_is_kept_together() -> None:
    sim = pool()
    sim.submit([Submission(0, "job-1", spec(most=2, tenant="new"), Sharded(10))])
    sim.run(until=100)
    full = tuple(RemovedUsage(tenant=f"t-{n}") for n in range(1000))
    scheduler = Scheduler(epoch=2)
    scheduler.handle(StateRestored(jobs=(sim.records["job-1"],), removed_usage=full), now=sim.now)
    commands = scheduler.handle(JobChangeRequested("delete", JobDelete(job_id="job-1")), now=sim.now)
    (removed,) = [command.usage for command in commands if isinstance(command, StoreUsage)]
    assert (removed.tenant, removed.jobs) == ("other-tenants", ("job-1",))


def test_when_a_job_becomes_due_it_is_decided_again_and_what_started_since_makes_room() -> None:
    """`job-2` waits for six slots. While it is not due, `job-3` takes what it could have had; the next one does not."""
    sim = pool()
    sim.submit(
        [
            Submission(0, "job-1", spec(least=4, most=4), Sharded(1_000_000)),
            Submission(1, "job-2", spec(least=6, priority=1), Sharded(1_000_000)),
            Submission(2, "job-3", spec(least=4, most=4), Sharded(1_000_000)),
        ]
    )
    sim.run(until=10)
    sim.restart_scheduler()
    sim.send_heartbeats()
    sim.run(until=PATIENCE_SECONDS + 10)
    sim.handle(Tick())
    assert sim.scheduler.explain()["job-2"].startswith("waiting for 6 slots")
    sim.handle(JobChangeRequested("pause", JobPause(job_id="job-3")))
    sim.run(until=PATIENCE_SECONDS + 20)
    sim.handle(JobChangeRequested("resume", JobResume(job_id="job-3")))
    sim.run(until=PATIENCE_SECONDS + 30)
    assert [len(sim.members(job)) for job in ("job-1", "job-2", "job-3")] == [4, 0, 4]
    sim.handle(JobChangeRequested("stop", JobStop(job_id="job-1")))
    sim.run(until=PATIENCE_SECONDS + 50)
    assert [len(sim.members(job)) for job in ("job-2", "job-3")] == [8, 0]


def test_of_many_jobs_that_are_removed_at_once_each_is_counted_though_few_at_a_time() -> None:
    sim = pool()
    sim.submit([Submission(0, "job-1", spec(most=2), Sharded(10))])
    sim.run(until=100)
    record = sim.records["job-1"]
    jobs = tuple(record.model_copy(update={"job": f"job-{n}", "is_deleted": True}) for n in range(1, MAX_COUNTED + 3))
    scheduler = Scheduler(epoch=2)
    commands = scheduler.handle(StateRestored(jobs=jobs), now=sim.now)
    removals = [command.job for command in commands if isinstance(command, RemoveJob)]
    assert len(removals) == MAX_COUNTED
    (first,) = [command.usage for command in commands if isinstance(command, StoreUsage)]
    assert len(first.jobs) == MAX_COUNTED
    for job in removals:
        commands = scheduler.handle(JobRemoved(job), now=sim.now)
        removals += [command.job for command in commands if isinstance(command, RemoveJob)]
    assert sorted(removals) == sorted(record.job for record in jobs)
    (last,) = [command.usage for command in commands if isinstance(command, StoreUsage)]
    assert last.jobs == ()
    assert last.used.slot_milliseconds == len(jobs) * record.usage.slot_milliseconds
