"""What the core cannot handle costs its sender, whatever the core had changed by then, and nobody else."""

from typing import Any, cast

import pytest

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import (
    Command,
    Event,
    HostRemoved,
    JobChangeRequested,
    JobSubmitted,
    PolicyChangeRequested,
    PoolSuspendRequested,
    Request,
    StateRestored,
    TenantChangeRequested,
)
from resile_scheduler.core.host_events import HostEvents
from resile_scheduler.core.job_commands import JobCommands
from resile_scheduler.core.restart import IGNORED_SECONDS, MAX_REASON, RestartableScheduler
from resile_scheduler.core.retention import OVER_SECONDS
from resile_scheduler.core.takeover import Takeover
from resile_scheduler.core.worker_reports import WorkerReports
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import JobDelete, JobStop, PoolPolicy, TenantSet
from resile_shared.messages.hosts import Heartbeat, HostState
from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.reports import Ready, Report
from resile_shared.policies import PolicyName
from resile_shared.recent_events import InternalError

UNLUCKY = 13
REQUEST = JobChangeRequested("unlucky", JobStop(job_id="job-9"))


@pytest.fixture(autouse=True)
def superstition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the core raise when a job with 13 shards is ready, once that is recorded."""
    handle = WorkerReports.handle

    def superstitious(self: WorkerReports, report: Report, *, now: float) -> None:
        is_over = self._pool.jobs[report.job].is_over
        handle(self, report, now=now)
        if not is_over and isinstance(report.content, Ready) and report.content.num_shards == UNLUCKY:
            raise ValueError("13 shards\n" + 10 * MAX_REASON * "!")

    monkeypatch.setattr(WorkerReports, "handle", superstitious)


class Shell:
    """What the service does with the core: it drops a report, a heartbeat or a request that raises."""

    def __init__(self, epoch: int) -> None:
        self.dropped: list[Any] = []
        self._epoch = epoch
        self.core = RestartableScheduler(self._new, chosen=PoolPolicy(policy=PolicyName.FIFO))

    def _new(self, chosen: PoolPolicy | None) -> Scheduler:
        return Scheduler(epoch=self._epoch, secret="s", policies=POLICIES, chosen=chosen)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        try:
            return self.core.handle(event, now=now)
        except InternalError as error:
            assert isinstance(event, Report | Heartbeat | Request)
            self.dropped.append(event)
            return self.core.handle(self.core.without(event, error.fault, now=now), now=now)


class ShelledPool(SimulatedPool):
    """A pool in virtual time whose scheduler drops what it cannot handle."""

    def __init__(self) -> None:
        super().__init__()
        self.handle(StateRestored())
        self.add_host("host-1", 4)

    def _new_scheduler(self) -> Scheduler:
        self.shell = Shell(self._epoch)
        return cast(Scheduler, self.shell)

    def submit_job(self, number: int, *, num_shards: int = 24, seconds: float = 10.0) -> None:
        spec = JobSpec(name="train", package="packages/1", script="train.py", max_workers=2)
        training = Sharded(1000, num_shards=num_shards)
        self.submit([Submission(self.now - self.start, f"job-{number}", spec, training)])
        self.run(until=self.now - self.start + seconds)

    def drop_a_report(self, number: int) -> None:
        """Submit a job whose report raises."""
        num_before = len(self.shell.dropped)
        self.submit_job(number, num_shards=UNLUCKY)
        assert [report.job for report in self.shell.dropped[num_before:]] == [f"job-{number}"]

    def without_dropped(self) -> StateRestored:
        """What the core begins again from after one more report like the first that was dropped."""
        return self.shell.core.without(self.shell.dropped[0], "another", now=self.now)

    def state(self, job: str) -> str:
        return self.records[job].state.value


@pytest.fixture
def pool() -> ShelledPool:
    """Job 1 trains on two of four slots."""
    pool = ShelledPool()
    pool.submit_job(1)
    assert pool.state("job-1") == "running"
    return pool


def test_a_report_that_raises_fails_its_job_and_no_other(pool: ShelledPool) -> None:
    members = pool.members("job-1")
    pool.drop_a_report(2)
    assert pool.state("job-2") == "failed"
    assert pool.alive("job-2") == ()
    assert pool.members("job-1") == members, "the other job trains on"
    pool.submit_job(3)
    assert pool.state("job-3") == "running", "the slots of the one that failed are free again"
    pool.run(until=1000)
    assert {pool.state("job-1"), pool.state("job-3")} == {"completed"}


def test_the_history_says_why_in_one_bounded_line(pool: ShelledPool) -> None:
    pool.drop_a_report(2)
    reason = pool.histories["job-2"][-1].reason
    assert reason.startswith("the scheduler cannot handle the report 'ready' of worker 0 (ValueError: 13 shards !!!")
    assert reason.endswith(": please report it with the scheduler's log")
    assert len(reason) < MAX_REASON + 150


def test_the_same_report_has_no_effect_on_the_next_scheduler(pool: ShelledPool) -> None:
    pool.drop_a_report(2)
    report = pool.shell.dropped[0]
    pool.restart_scheduler()
    pool.handle(report)
    assert pool.shell.dropped == []
    assert pool.state("job-2") == "failed"


def test_each_item_of_a_history_has_its_own_number(pool: ShelledPool) -> None:
    pool.drop_a_report(2)
    pool.run(until=1000)
    for items in pool.histories.values():
        assert [item.number for item in items] == list(range(1, len(items) + 1))


def test_what_operators_have_chosen_stays(pool: ShelledPool) -> None:
    pool.handle(PolicyChangeRequested("policy", PoolPolicy(policy=PolicyName.GOODPUT)))
    pool.handle(TenantChangeRequested("tenant", TenantSet(tenant_id="a", weight=2)))
    pool.drop_a_report(2)
    pool.handle(PolicyChangeRequested("no preemption", PoolPolicy(preemption=False)))
    pool.handle(TenantChangeRequested("another tenant", TenantSet(tenant_id="b", weight=2)))
    assert pool.policy_record is not None
    assert pool.policy_record.policy is PolicyName.GOODPUT
    assert pool.tenants_record is not None
    assert set(pool.tenants_record.tenants) == {"a", "b"}


def test_a_pool_that_is_about_to_stop_starts_nothing(pool: ShelledPool) -> None:
    pool.drop_a_report(2)
    pool.handle(PoolSuspendRequested("suspend", epoch=1))
    pool.handle(PoolSuspendRequested("suspend", epoch=0))  # late, for the scheduler before
    pool.handle(pool.without_dropped())
    pool.submit_job(3)
    assert pool.state("job-3") == "queued"


def test_a_number_is_not_given_again(pool: ShelledPool) -> None:
    pool.drop_a_report(2)
    pool.handle(JobChangeRequested("delete", JobDelete(job_id="job-2")))
    pool.run(until=40)
    assert [removal.job for removal in pool.removals] == ["job-2"]
    pool.drop_a_report(3)
    pool.handle(JobChangeRequested("delete it", JobDelete(job_id="job-3")))
    pool.drop_a_report(4)
    restored = pool.without_dropped()
    assert restored.last_number == 3
    assert {record.job for record in restored.jobs} == {"job-1", "job-4"}
    assert {allocation.job for allocation in restored.allocations} == {"job-1", "job-4"}


def test_what_the_scheduler_before_has_stored_is_not_lost(pool: ShelledPool) -> None:
    """Nothing is stored of a job that has ended any more, nor of what removed jobs have used: it was only found."""
    for number in (2, 3):
        pool.submit_job(number)
        pool.handle(JobChangeRequested(f"stop {number}", JobStop(job_id=f"job-{number}")))
    pool.run(until=60)
    pool.handle(JobChangeRequested("delete", JobDelete(job_id="job-3")))
    pool.run(until=70)
    assert pool.records.keys() == {"job-1", "job-2"}
    before = pool.shell.core.without(REQUEST, "a fault", now=pool.now)
    assert {usage.tenant for usage in before.removed_usage} == {"default"}
    pool.restart_scheduler()
    restored = pool.shell.core.without(REQUEST, "a fault", now=pool.now)
    assert {record.job: record.state.value for record in restored.jobs} == {"job-1": "running", "job-2": "stopped"}
    assert {allocation.job for allocation in restored.allocations} == {"job-1", "job-2"}
    assert restored.removed_usage == before.removed_usage
    assert restored.last_number == 3


def test_a_removal_that_was_under_way_when_the_core_began_again_ends_once(pool: ShelledPool) -> None:
    pool.drop_a_report(2)
    pool.handle(JobChangeRequested("stop", JobStop(job_id="job-1")))
    pool.run(until=40)
    pool.handle(JobChangeRequested("delete", JobDelete(job_id="job-1")))
    pool.handle(pool.without_dropped())
    pool.run(until=50)
    pool.send_heartbeats()
    assert [removal.job for removal in pool.removals] == ["job-1"]
    assert pool.records.keys() == {"job-2"}


def test_hosts_are_those_of_the_newest_records(pool: ShelledPool) -> None:
    for name in ("host-2", "host-3"):
        pool.add_host(name, 1)
    pool.change_host("host-2", HostState.DRAINING)
    pool.change_host("host-3", HostState.LEFT)
    pool.handle(HostRemoved("host-3"))
    pool.drop_a_report(2)
    restored = pool.without_dropped()
    assert {host.host: host.state for host in restored.hosts} == {
        "host-1": HostState.UP,
        "host-2": HostState.DRAINING,
    }


def test_a_request_that_raises_leaves_no_trace(pool: ShelledPool, monkeypatch: pytest.MonkeyPatch) -> None:
    members, submit = pool.members("job-1"), JobCommands.submit

    def superstitious(self: JobCommands, event: JobSubmitted, *, now: float) -> object:
        answer = submit(self, event, now=now)
        if event.spec.name == "unlucky":
            raise ValueError("unlucky")
        return answer

    monkeypatch.setattr(JobCommands, "submit", superstitious)
    unlucky = JobSubmitted("unlucky", JobSpec(name="unlucky", package="packages/1", script="train.py"), job="job-9")
    pool.handle(unlucky)
    assert pool.shell.dropped == [unlucky]
    pool.send_heartbeats()
    pool.submit_job(2)
    assert pool.records.keys() == {"job-1", "job-2"}
    assert pool.members("job-1") == members
    pool.run(until=1000)
    assert {pool.state("job-1"), pool.state("job-2")} == {"completed"}


def test_heartbeats_of_a_host_are_ignored_for_a_while_after_one_that_raised(
    pool: ShelledPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, on_heartbeat = pool.members("job-1"), HostEvents.on_heartbeat
    arrived: list[float] = []

    def superstitious(self: HostEvents, heartbeat: Heartbeat, *, now: float) -> None:
        on_heartbeat(self, heartbeat, now=now)
        if heartbeat.host == "host-13":
            arrived.append(now)
            if len(arrived) == 1:
                raise ValueError("host 13")

    monkeypatch.setattr(HostEvents, "on_heartbeat", superstitious)
    pool.add_host("host-13", 4)
    for _ in range(2):
        pool.send_heartbeats()
    pool.submit_job(2)
    pool.submit_job(3)
    assert len(pool.shell.dropped) == len(arrived) == 1
    assert pool.members("job-1") == members
    assert pool.hosts_of("job-2") == {"host-1"}
    assert pool.state("job-3") == "queued", "nothing is known of the slots of host-13"
    pool.run(until=arrived[0] + IGNORED_SECONDS - pool.start)
    pool.send_heartbeats()
    assert len(arrived) == 2
    pool.run(until=pool.now - pool.start + 10)
    assert pool.hosts_of("job-3") == {"host-13"}


def test_each_host_is_ignored_for_a_time_of_its_own(pool: ShelledPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def superstitious(self: HostEvents, heartbeat: Heartbeat, *, now: float) -> None:
        raise ValueError(heartbeat.host)

    monkeypatch.setattr(HostEvents, "on_heartbeat", superstitious)
    for host in ("host-2", "host-3"):
        pool.add_host(host, 1)
    pool.send_heartbeats()
    second, third = (next(h for h in pool.shell.dropped if h.host == host) for host in ("host-2", "host-3"))
    now, without = pool.now + 2 * IGNORED_SECONDS, pool.shell.core.without
    assert without(second, "a fault", now=now).ignored_hosts == {"host-2"}, "the others' time is over"
    assert without(third, "a fault", now=now + IGNORED_SECONDS / 2).ignored_hosts == {"host-2", "host-3"}
    assert without(third, "a fault", now=now + IGNORED_SECONDS).ignored_hosts == {"host-3"}


def test_a_host_whose_heartbeats_always_raise_does_not_hold_up_removals_for_good(
    pool: ShelledPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_heartbeat = HostEvents.on_heartbeat

    def superstitious(self: HostEvents, heartbeat: Heartbeat, *, now: float) -> None:
        on_heartbeat(self, heartbeat, now=now)
        if heartbeat.host == "host-13":
            raise ValueError("host 13")

    monkeypatch.setattr(HostEvents, "on_heartbeat", superstitious)
    pool.add_host("host-13", 4)
    pool.handle(JobChangeRequested("stop", JobStop(job_id="job-1")))
    pool.handle(JobChangeRequested("delete", JobDelete(job_id="job-1")))
    for seconds in range(0, 1000, 10):
        pool.later(seconds, pool.send_heartbeats)
    pool.run(until=OVER_SECONDS)
    assert pool.alive("job-1") == ()
    assert pool.removals == [], "a worker of it may be alive on host-13"
    pool.run(until=1000)
    assert [removal.job for removal in pool.removals] == ["job-1"]


def test_a_fault_that_is_not_the_reports_is_raised(pool: ShelledPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Takeover, event: StateRestored, *, now: float) -> None:
        raise AssertionError("a rule is broken")

    monkeypatch.setattr(Takeover, "restore", broken)
    with pytest.raises(InternalError, match="a rule is broken"):
        pool.drop_a_report(2)
