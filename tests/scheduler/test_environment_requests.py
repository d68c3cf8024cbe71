"""Environments before slots: a job gets slots only where its packages are, and what cannot be built never has any."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.core.events import AssignJobs, Command, Event, JobChangeRequested, Reply, Tick, WriteAllocation
from resile_scheduler.core.slots.environment_requests import MAX_ENVIRONMENTS
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import Accepted, JobPause, JobStop
from resile_shared.messages.hosts import EnvironmentReport, Heartbeat, HostState
from resile_shared.messages.jobs import JobState

from .test_core import Bench, ready, worker
from .test_incremental import TwoSchedulers

PACKAGES = ("marker>=1",)


class Builders(Bench):
    """A scheduler, and hosts whose agents build environments when a test lets them."""

    new_scheduler = TwoSchedulers

    def __init__(self, *slots: int) -> None:
        names = [f"host-{number}" for number in range(1, len(slots) + 1)]
        self.asked: dict[str, tuple[str, ...]] = {}
        self.reports: dict[str, dict[str, EnvironmentReport]] = {name: {} for name in names}
        self.incarnations = dict.fromkeys(names, 1)
        self.num_placed: Counter[str] = Counter()
        super().__init__(*slots)

    def tell_once(self, event: Event) -> list[Command]:
        commands = super().tell_once(event)
        for command in commands:
            match command:
                case AssignJobs(host, incarnation, _, environments) if incarnation == self.incarnations[host]:
                    self.asked[host] = environments
                    known = self.reports[host]
                    self.reports[host] = {
                        job: known.get(job) or EnvironmentReport(job=job, state="waiting") for job in environments
                    }
                case WriteAllocation(Allocation(job=job, placements=placements)):
                    for placement in placements[self.num_placed[job] :] if self.records[job].spec.requirements else ():
                        assert self.reports[placement.host][job].state == "ready", "it would build in its slot"
                    self.num_placed[job] = len(placements)
        return commands

    def hear(self, host: str = "host-1") -> list[Command]:
        """Send the heartbeat of a host that runs no workers."""
        self.beats += 1
        return self.tell(
            Heartbeat(
                host=host,
                incarnation=self.incarnations[host],
                number=self.beats,
                jobs=self.assigned.get(host),
                environments=tuple(self.reports[host].values()),
            )
        )

    def become(self, state: str, host: str = "host-1", job: str = "job-1", **more: object) -> list[Command]:
        """Report that a host has come further with the environment of a job."""
        report = EnvironmentReport.model_validate({"job": job, "state": state, **more})
        self.reports[host][job] = report
        return self.hear(host)

    def hear_workers(self) -> None:
        """Send the heartbeats of all hosts, with the workers of job-1."""
        for name in self.hosts:
            workers = [worker(p.worker, p.slot) for p in self.newest().placements if p.host == name]
            self.beats += 1
            reports = tuple(self.reports[name].values())
            jobs = self.assigned.get(name)
            beat = Heartbeat(host=name, incarnation=1, number=self.beats, jobs=jobs, environments=reports)
            self.tell(beat.model_copy(update={"workers": tuple(workers)}))

    def require(self, number: int = 1, *requirements: str, **changes: object) -> list[Command]:
        return self.submit(number, requirements=requirements or PACKAGES, **changes)

    def hosts_of(self, job: str = "job-1") -> list[str]:
        """The hosts on which the newest allocation of a job places workers."""
        allocations = [allocation for allocation in self.allocations if allocation.job == job]
        return sorted({p.host for p in allocations[-1].placements}) if allocations else []

    def reason(self, job: str = "job-1") -> str:
        return self.scheduler.explain()[job]

    def building(self, job: str = "job-1") -> list[str]:
        return sorted(host for host, jobs in self.asked.items() if job in jobs)


def all_heard(*slots: int) -> Builders:
    bench = Builders(*slots)
    for host in bench.hosts:
        bench.hear(host)
    return bench


def test_a_job_gets_slots_once_a_host_has_its_environment() -> None:
    bench = all_heard(2)
    bench.require()
    assert bench.asked == {"host-1": ("job-1",)}
    assert bench.hosts_of() == []
    bench.become("building")
    assert bench.reason() == "host-1 is building the environment of job-1"
    assert bench.hosts_of() == []
    bench.become("ready")
    assert bench.hosts_of() == ["host-1"]


def test_other_jobs_keep_all_slots_meanwhile() -> None:
    bench = all_heard(2, 2)
    bench.submit(1)
    assert len(bench.newest("job-1").placements) == 4
    num_allocations = len(bench.allocations)
    bench.require(2, priority=1_000_000)
    bench.become("building", job="job-2")
    assert len(bench.allocations) == num_allocations


def test_an_environment_that_cannot_be_built_fails_its_job_before_it_had_a_slot() -> None:
    bench = all_heard(2, 2)
    bench.require()
    (host,) = bench.building()
    bench.become("failed", host, reason="the job's environment cannot be built: nothing of that name")
    assert bench.records["job-1"].state is JobState.FAILED
    assert bench.records["job-1"].reason == "the job's environment cannot be built: nothing of that name"
    assert not bench.allocations
    assert not any(bench.asked.values())


def test_a_host_that_is_at_fault_is_avoided_and_another_one_builds() -> None:
    bench = all_heard(2, 2)
    bench.require()
    bench.become("failed", "host-1", reason="no space is left", is_hosts_fault=True)
    assert bench.records["job-1"].state is JobState.QUEUED
    assert bench.building() == ["host-2"]
    bench.become("ready", "host-2")
    assert bench.hosts_of() == ["host-2"]


def test_the_only_host_is_tried_again_after_a_while() -> None:
    bench = all_heard(2)
    bench.require()
    bench.become("failed", reason="no space is left", is_hosts_fault=True)
    assert bench.building() == []
    assert bench.reason() == "waiting a while: host-1: no space is left"
    bench.hear()
    bench.now += 6
    bench.tell(Tick())
    assert bench.building() == ["host-1"]
    bench.become("ready")
    assert bench.hosts_of() == ["host-1"]


def test_a_failure_is_not_reported_twice_if_the_instruction_to_forget_it_was_lost() -> None:
    bench = all_heard(2)
    bench.require()
    bench.become("failed", reason="no space is left", is_hosts_fault=True)
    lost = EnvironmentReport(job="job-1", state="failed", reason="no space is left", is_hosts_fault=True)
    bench.now += 60
    bench.reports["host-1"] = {"job-1": lost}
    bench.tell(Tick())
    bench.hear()
    assert bench.asked["host-1"] == (), "the agent is told once more to forget it"
    bench.hear()
    assert bench.asked["host-1"] == ("job-1",)


def test_a_lost_host_is_replaced() -> None:
    bench = all_heard(4, 2)
    bench.require()
    bench.become("building")
    bench.host("host-1", 4, state=HostState.LOST)
    assert "job-1" in bench.asked["host-2"]
    bench.become("ready", "host-2")
    assert bench.hosts_of() == ["host-2"]


def test_an_agent_that_is_back_builds_again() -> None:
    bench = all_heard(2)
    bench.require()
    bench.become("building")
    bench.reports["host-1"], bench.incarnations["host-1"], bench.asked = {}, 2, {}
    bench.host("host-1", 2, incarnation=2)
    assert bench.hosts_of() == [], "a new incarnation has not reported yet"
    bench.hear()
    assert bench.asked["host-1"] == ("job-1",)
    bench.become("ready")
    assert bench.hosts_of() == ["host-1"]


def test_a_new_scheduler_starts_nothing_before_hosts_have_reported() -> None:
    bench = all_heard(2)
    bench.require()
    bench.become("ready")
    bench.tell(JobChangeRequested("stop", JobStop(job_id="job-1")))
    bench.require(2)
    bench.become("building", job="job-2")
    num_allocations = len(bench.allocations)
    bench.restart()
    assert len(bench.allocations) == num_allocations
    bench.hear()
    assert bench.reason("job-2") == "host-1 is building the environment of job-2"
    assert bench.hosts_of("job-2") == []
    bench.become("ready", job="job-2")
    assert bench.hosts_of("job-2") == ["host-1"]


def test_the_others_build_once_the_first_host_is_ready() -> None:
    bench = all_heard(2, 2, 2, 2)
    bench.require()
    assert len(bench.building()) == 1
    counts = [1]
    while len(bench.building()) < 4:
        for host in bench.building():
            bench.become("ready", host)
        assert len(bench.building()) > counts[-1], "a job that uses all its hosts gets more"
        counts.append(len(bench.building()))
    for host in bench.building():
        bench.become("ready", host)
    bench.activate()
    assert len(bench.newest().placements) == 8
    assert counts == [1, 2, 4]


def test_no_more_hosts_build_than_the_job_can_use() -> None:
    bench = all_heard(2, 2, 2, 2)
    bench.require(max_workers=3)
    for _ in range(4):
        for host in bench.building():
            bench.become("ready", host)
    assert len(bench.building()) == 2


def test_hosts_for_the_minimum_build_at_the_same_time() -> None:
    bench = all_heard(2, 2, 2, 2)
    bench.require(min_workers=6)
    (first,) = bench.building()
    bench.become("ready", first)
    assert len(bench.building()) == 3
    assert bench.hosts_of() == []
    for host in bench.building():
        bench.become("ready", host)
    assert len(bench.newest().placements) == 6


def test_a_job_whose_hosts_are_full_builds_where_slots_are_free() -> None:
    bench = all_heard(2, 2)
    bench.require(1, max_workers=2)
    bench.become("ready", "host-1")
    bench.require(2, max_workers=2)
    (host,) = bench.building("job-2")
    bench.become("ready", host, "job-2")
    for other in bench.building("job-2"):
        bench.become("ready", other, "job-2")
    assert bench.hosts_of("job-2") == ["host-2"]
    assert bench.hosts_of("job-1") == ["host-1"]


def test_another_job_gives_up_slots_where_the_environment_is_ready() -> None:
    bench = all_heard(2, 2)
    bench.submit(1)
    bench.hear_workers()
    bench.report(ready())
    bench.switch()
    bench.require(2)
    (host,) = bench.building("job-2")
    bench.reports[host]["job-2"] = EnvironmentReport(job="job-2", state="ready")
    bench.hear_workers()
    assert {p.host for p in bench.newest("job-1").placements} == set(bench.hosts) - {host}


def test_one_job_after_the_other_is_built_and_both_are_told() -> None:
    bench = all_heard(2)
    bench.require(1, "marker==1")
    bench.become("building")
    bench.require(2, "marker==2", priority=1_000_000)
    assert bench.asked["host-1"] == ("job-2", "job-1"), "in the order of the queue"
    bench.hear()
    assert bench.reason("job-2") == "host-1 builds the environment of job-1 first"


def test_a_host_builds_for_a_bounded_number_of_queued_jobs() -> None:
    bench = all_heard(2)
    for number in range(1, MAX_ENVIRONMENTS + 4):
        bench.require(number, f"marker=={number}")
    assert len(bench.asked["host-1"]) == MAX_ENVIRONMENTS
    bench.require(20, "marker==1")
    assert "job-20" in bench.asked["host-1"], "those with the same requirements share one"


@pytest.mark.parametrize("change", [JobPause(job_id="job-1"), JobStop(job_id="job-1")])
def test_a_job_that_does_not_want_slots_any_more_is_not_built(change: JobPause | JobStop) -> None:
    bench = all_heard(2)
    bench.require()
    bench.become("building")
    bench.tell(JobChangeRequested("change", change))
    assert bench.asked["host-1"] == ()


def test_a_job_that_waits_for_its_environment_is_accepted_without_a_warning() -> None:
    bench = all_heard(2)
    (answer,) = [command.answer for command in bench.require() if isinstance(command, Reply)]
    assert isinstance(answer, Accepted)
    assert answer.warning == ""
    (answer,) = [command.answer for command in bench.require(2, min_workers=3) if isinstance(command, Reply)]
    assert isinstance(answer, Accepted)
    assert "its minimum is 3" in answer.warning or "3" in answer.warning


def test_an_agent_that_builds_nothing_ahead_gets_workers_at_once() -> None:
    bench = Bench(2)
    bench.beat()
    bench.submit(requirements=PACKAGES)
    assert len(bench.newest().placements) == 2


def test_a_job_that_trains_outlives_a_host_that_cannot_build() -> None:
    bench = all_heard(2, 2)
    bench.require()
    (first,) = bench.building()
    bench.become("ready", first)
    (second,) = set(bench.building()) - {first}
    bench.become("failed", second, reason="no wheel for this platform")
    assert bench.records["job-1"].state is not JobState.FAILED
    assert bench.building() == [first]


states = st.sampled_from(["building", "ready", "failed"])


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), states, st.booleans()), max_size=25),
)
def test_nothing_starts_where_nothing_was_reported_and_one_ready_host_is_enough(
    slots: list[int], steps: list[tuple[int, int, str, bool]]
) -> None:
    bench = all_heard(*slots)
    for number in range(1, 4):
        bench.require(number, f"marker=={number}")
    for index, number, state, is_late in steps:
        host, job = f"host-{index % len(slots) + 1}", f"job-{number}"
        if is_late:
            bench.now += 100.0
            bench.tell(Tick())
        if job in bench.reports[host]:
            bench.become(state, host, job, is_hosts_fault=True)
        else:
            bench.hear(host)
    reports = [report for of_host in bench.reports.values() for report in of_host.values()]
    if any(report.state == "ready" for report in reports):
        assert any(allocation.placements for allocation in bench.allocations), "a job with one ready host starts"
