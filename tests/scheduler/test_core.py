"""The scheduler's core: one rule per test, and then everything at once in any order, with a lossy bus."""

import signal
from collections.abc import Iterable
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import (
    AssignJobs,
    Command,
    Event,
    JobChangeRequested,
    JobNotStored,
    JobSubmitted,
    PauseWorkers,
    PoolSuspendRequested,
    Reply,
    StateRestored,
    StopWorkers,
    StoreJob,
    Tick,
    WriteAllocation,
)
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import ID_REUSED, Accepted, JobPause, JobPriority, JobResume, JobStop, Refused
from resile_shared.messages.hosts import (
    AFTER_TRAINING,
    Address,
    Heartbeat,
    HostRecord,
    HostState,
    Slot,
    WorkerExit,
    WorkerReport,
)
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import BatchRange, Completed, Content, Failed, Ready, Report, Switched
from resile_shared.version import VERSION

from .checks import Checker


def spec(**changes: object) -> JobSpec:
    settings = {"name": "train", "package": "packages/1", "script": "train.py", "max_workers": 100, **changes}
    return JobSpec.model_validate(settings)


def ready(num_shards: int = 24) -> Ready:
    return Ready(iterations_total=100, num_shards=num_shards, batch_size=192, epochs=1, samples=19200, bits="same bits")


class Bench:
    """A scheduler, and methods that act as its agents."""

    new_scheduler = Scheduler

    def __init__(self, *slots: int, detection_seconds: float = 3.0) -> None:
        self.scheduler = self.new_scheduler(epoch=1, secret="s", detection_seconds=detection_seconds)
        self.now = 1000.0
        self.beats = 0
        self.records: dict[str, JobRecord] = {}
        self.histories: dict[str, list[HistoryItem]] = {}
        self.allocations: list[Allocation] = []
        self.hosts: dict[str, HostRecord] = {}
        self.assigned: dict[str, tuple[str, ...]] = {}
        for number, num_slots in enumerate(slots, start=1):
            self.host(f"host-{number}", num_slots)

    def tell_once(self, event: Event) -> list[Command]:
        commands = self.scheduler.handle(event, now=self.now)
        for command in commands:
            match command:
                case StoreJob(record, items):
                    self.records[record.job] = record
                    self.histories.setdefault(record.job, []).extend(items)
                case WriteAllocation(allocation):
                    self.allocations.append(allocation)
                case AssignJobs(host, _, jobs):
                    self.assigned[host] = jobs
        return commands

    def tell(self, event: Event) -> list[Command]:
        commands = self.tell_once(event)
        if not isinstance(event, StateRestored):
            again = [c for c in self.scheduler.handle(event, now=self.now) if not isinstance(c, StopWorkers)]
            replies = [command for command in commands if isinstance(command, Reply)]
            assert again == replies, "what arrives twice has its effect once"
        return commands

    def restart(self) -> list[Command]:
        """Replace the scheduler by a new one, which takes over what is stored; return its first commands."""
        hosts = tuple(self.hosts.values())
        newest = {allocation.job: allocation for allocation in self.allocations}
        epoch = max((allocation.epoch for allocation in self.allocations), default=0) + 1
        self.scheduler = self.new_scheduler(epoch=epoch, secret="s")
        return self.tell(StateRestored(tuple(self.records.values()), tuple(newest.values()), hosts))

    def host(
        self,
        name: str,
        num_slots: int,
        *,
        state: HostState = HostState.UP,
        incarnation: int = 1,
        version: str = VERSION,
        device_class: str = "cpu",
    ) -> None:
        slots = tuple(Slot(index=index) for index in range(num_slots))
        record = HostRecord(
            host=name,
            incarnation=incarnation,
            state=state,
            address="h",
            slots=slots,
            device_class=device_class,
            version=version,
            since=at(self.now),
        )
        self.hosts[name] = record
        self.tell(record)

    def submit(self, number: int = 1, **changes: object) -> list[Command]:
        return self.tell(JobSubmitted(f"submit-{number}", spec(**changes), job=f"job-{number}"))

    def beat(self, *workers: WorkerReport, host: str = "host-1", num_waiting: int = 0) -> list[Command]:
        self.beats += 1
        return self.tell(
            Heartbeat(
                host=host,
                incarnation=1,
                number=self.beats,
                num_waiting=num_waiting,
                jobs=self.assigned.get(host),
                workers=workers,
            )
        )

    def report(self, content: Content, *, worker: int = 0, generation: int = 0, job: str = "job-1") -> list[Command]:
        return self.tell(
            Report(
                job=job,
                host="host-1",
                incarnation=1,
                worker=worker,
                slot=worker,
                generation=generation,
                time=at(self.now),
                content=content,
            )
        )

    def activate(self, *, num_shards: int = 24, job: str = "job-1") -> None:
        """Make the newest allocation of a job active."""
        self.listen(job=job)
        self.report(ready(num_shards), worker=self.newest(job).placements[0].worker, job=job)
        self.switch(job=job)

    def listen(self, *, job: str = "job-1") -> None:
        self.beat(*(worker(p.worker, p.slot, job=job) for p in self.newest(job).placements))

    def switch(self, *, job: str = "job-1", iteration: int = 0) -> list[Command]:
        allocation = self.newest(job)
        workers = tuple(p.worker for p in allocation.placements)
        switched = Switched(workers=workers, iteration=iteration)
        return self.report(switched, worker=workers[0], generation=allocation.generation, job=job)

    def newest(self, job: str = "job-1") -> Allocation:
        return [allocation for allocation in self.allocations if allocation.job == job][-1]

    def kinds(self, job: str = "job-1") -> list[str]:
        return [item.kind for item in self.histories[job]]


def worker(
    number: int, slot: int | None = None, *, job: str = "job-1", state: str = "starting", at: str = "h"
) -> WorkerReport:
    address = Address(host=at, port=1000 + number)
    slot = number if slot is None else slot
    return WorkerReport.model_validate({"job": job, "worker": number, "slot": slot, "state": state, "address": address})


def gone(
    number: int, slot: int | None = None, *, job: str = "job-1", kind: str = "left", message: str = "why"
) -> WorkerReport:
    ended = worker(number, slot, job=job, state="gone")
    status = -signal.SIGSEGV if kind == "killed" else 0
    exit_ = WorkerExit.model_validate({"kind": kind, "status": status, "message": message})
    return ended.model_copy(update={"exit": exit_})


def test_accepted_is_answered_after_the_job_is_stored() -> None:
    bench = Bench(2)
    commands = bench.submit()
    kinds = [type(command) for command in commands]
    assert kinds == [StoreJob, Reply, WriteAllocation, AssignJobs]
    assert commands[1] == Reply("submit-1", Accepted(job_id="job-1"))
    assert bench.records["job-1"].applied_commands == ("submit-1",)


def test_what_happens_to_one_job_writes_nothing_of_those_that_wait() -> None:
    bench = Bench(2, 2)
    bench.submit(1)
    bench.listen()
    bench.beat(*(worker(p.worker, p.slot) for p in bench.newest().placements if p.host == "host-2"), host="host-2")
    bench.switch()
    for number in range(2, 60):
        bench.submit(number, min_workers=4)
    lost = bench.hosts["host-2"].model_copy(update={"state": HostState.LOST})
    written = bench.tell(lost)
    assert bench.newest().is_recovery
    assert [type(command) for command in written] == [StoreJob, WriteAllocation]


def test_the_id_of_a_request_cannot_be_used_for_another_one() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.submit(2)
    raised = JobChangeRequested("c1", JobPriority(job_id="job-1", priority=7))
    bench.tell(raised)
    reused = [
        JobSubmitted("submit-1", spec(name="other")),
        JobSubmitted("c1", spec()),
        JobChangeRequested("submit-1", JobPause(job_id="job-1")),
        JobChangeRequested("c1", JobPause(job_id="job-2")),
    ]
    for restarted in (False, True):
        if restarted:
            bench.restart()
        for event in reused:
            assert bench.tell(event) == [Reply(event.command, ID_REUSED)]
        assert bench.tell(raised) == [Reply("c1", Accepted(job_id="job-1"))]
    assert {name: record.state for name, record in bench.records.items()} == {
        "job-1": JobState.STARTING,
        "job-2": JobState.QUEUED,
    }


def test_a_submission_is_the_same_whatever_of_it_could_be_stored() -> None:
    bench = Bench(2)
    submitted = JobSubmitted("submit-1", spec(args=("--large",)))
    bench.tell(submitted)
    bench.tell_once(JobNotStored("job-1", "it is too large"))
    stored = bench.records["job-1"]
    bench.records["job-1"] = stored.model_copy(update={"spec": spec()})  # as the executor stores it
    bench.restart()
    assert bench.tell(submitted) == [Reply("submit-1", Accepted(job_id="job-1"))]
    assert bench.tell(JobSubmitted("submit-1", spec())) == [Reply("submit-1", ID_REUSED)]


def test_a_job_that_the_hosts_cannot_run_is_accepted_with_a_warning() -> None:
    bench = Bench()
    assert not warning_of(bench.submit(1, min_workers=3)), "a pool without hosts has only begun"
    bench.host("host-1", 2)
    assert warning_of(bench.submit(2, min_workers=3)) == "waiting for hosts: its minimum is 3 and it can have at most 2"
    assert warning_of(bench.submit(3, group="gpu=h100")).startswith("waiting for a host with the labels gpu=h100")
    assert not warning_of(bench.submit(4, min_workers=2)), "it waits for others"


def warning_of(commands: list[Command]) -> str:
    (answer,) = (command.answer for command in commands if isinstance(command, Reply))
    assert isinstance(answer, Accepted)
    return answer.warning


def test_a_host_of_another_version_gets_no_slots_before_the_registry_says_so_too() -> None:
    bench = Bench()
    for version in ("0.0.1", ""):
        bench.host("host-1", 2, version=version)
    bench.submit()
    assert not bench.allocations
    bench.host("host-2", 1)
    assert [placement.host for placement in bench.newest().placements] == ["host-2"]


def test_a_job_leaves_the_hosts_whose_pool_was_upgraded() -> None:
    bench = Bench(1, 1)
    bench.submit()
    bench.beat(worker(0, 0), host="host-1")
    bench.beat(worker(1, 0), host="host-2")
    bench.switch()
    bench.hosts["host-2"] = bench.hosts["host-2"].model_copy(update={"version": "0.0.1"})
    bench.restart()
    bench.beat(worker(0, 0, state="member"), host="host-1")
    bench.beat(worker(1, 0, state="member"), host="host-2")
    assert [placement.host for placement in bench.newest().placements] == ["host-1"]
    assert bench.newest().is_recovery


def test_the_same_request_submits_once() -> None:
    bench = Bench(2)
    bench.submit()
    commands = bench.tell(JobSubmitted("submit-1", spec(), job="job-7"))
    assert commands == [Reply("submit-1", Accepted(job_id="job-1"))]
    assert list(bench.records) == ["job-1"]


def test_jobs_that_bring_no_id_are_numbered_on_also_by_a_new_scheduler() -> None:
    bench = Bench(1)
    for number in (1, 2, 3):
        accepted = bench.tell(JobSubmitted(f"submit-{number}", spec()))
        assert Reply(f"submit-{number}", Accepted(job_id=f"job-{number}")) in accepted
        if number == 2:
            bench.restart()


def test_a_new_scheduler_uses_free_slots_once_it_has_heard_of_their_host() -> None:
    bench = Bench(2)
    bench.submit(1, max_workers=1)
    bench.activate()
    bench.restart()
    bench.submit(2, max_workers=1)
    assert "job-2" not in {allocation.job for allocation in bench.allocations}
    bench.beat(worker(0, state="member"))
    assert [p.slot for p in bench.newest("job-2").placements] == [1]


def test_an_allocation_becomes_an_order_when_all_can_be_reached() -> None:
    bench = Bench(2)
    bench.submit()
    assert bench.newest().cold_start
    assert not bench.newest().has_addresses
    bench.beat(worker(0))
    assert len(bench.allocations) == 1
    bench.beat(worker(0), worker(1))
    assert len(bench.allocations) == 2
    assert bench.newest().has_addresses
    assert bench.newest().generation == 1
    bench.switch()
    assert bench.records["job-1"].state is JobState.RUNNING
    assert bench.histories["job-1"][-1].slots == ("host-1/0", "host-1/1")


def test_a_slot_moves_only_after_its_release_was_seen() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    assert [p.worker for p in bench.newest("job-1").placements] == [0]
    assert bench.newest("job-1").has_addresses, "a shrink waits for nothing"
    assert bench.scheduler.explain()["job-2"] == "waiting for slots that other jobs release"
    bench.switch(iteration=5)
    assert "job-2" not in {allocation.job for allocation in bench.allocations}
    bench.beat(worker(0, state="member"), worker(1, state="left"))
    assert "job-2" not in {allocation.job for allocation in bench.allocations}, "its process is still there"
    bench.beat(worker(0, state="member"), gone(1))
    assert [p.slot for p in bench.newest("job-2").placements] == [1]


def test_a_release_before_the_word_of_the_switch_does_not_free_the_slot_yet() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    bench.beat(worker(0, state="member"), gone(1))
    assert "job-2" not in {allocation.job for allocation in bench.allocations}
    bench.switch(iteration=5)
    assert bench.newest("job-2").placements[0].slot == 1


def test_a_late_release_does_not_free_a_slot_that_was_granted_again() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    bench.switch()
    bench.beat(worker(0, state="member"), gone(1))
    bench.beat(worker(0, state="member"), gone(1), worker(0, 1, job="job-2"))
    assert bench.scheduler.holders()["host-1/1"] == "job-2"


def test_a_priority_changes_the_shares_and_is_kept_in_the_history() -> None:
    bench = Bench(8)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    bench.switch()
    bench.beat(*(worker(n, state="member") for n in range(4)), *(gone(n) for n in range(4, 8)))
    bench.tell(JobChangeRequested("c1", JobPriority(job_id="job-2", priority=10_000)))
    assert bench.newest("job-1").reason == "priority of job-2 raised"
    assert len(bench.newest("job-1").placements) == 3
    item = bench.histories["job-2"][-1]
    assert (item.kind, item.reason) == ("priority", "raised from 5000 to 10000")


def test_what_cannot_be_done_is_refused_with_a_reason() -> None:
    bench = Bench(1)
    [unknown] = bench.tell(JobChangeRequested("c1", JobStop(job_id="job-9")))
    assert unknown == Reply("c1", Refused(code="unknown", reason="there is no job job-9: `resile jobs` lists them"))
    bench.submit()
    bench.tell(JobChangeRequested("c2", JobStop(job_id="job-1", reason="enough")))
    assert bench.histories["job-1"][-1].reason == "enough"
    [over] = bench.tell(JobChangeRequested("c3", JobPriority(job_id="job-1", priority=1)))
    assert isinstance(over, Reply)
    assert isinstance(over.answer, Refused)
    assert over.answer.code == "conflict"
    assert over.answer.reason.endswith("submit it again; `resile pause` keeps a job that is to continue later")


def test_a_stop_ends_all_workers_and_frees_their_slots_when_they_are_gone() -> None:
    bench = Bench(2)
    bench.submit()
    bench.activate()
    commands = bench.tell(JobChangeRequested("c1", JobStop(job_id="job-1")))
    assert commands[-1] == StopWorkers("job-1", "host-1", 1, (0, 1))
    assert bench.newest().placements == ()
    bench.submit(2)
    assert "job-2" not in {allocation.job for allocation in bench.allocations}
    assert bench.beat(worker(0), worker(1))[-1] == StopWorkers("job-1", "host-1", 1, (0, 1)), "told again"
    bench.beat(gone(0, kind="exited"), gone(1, kind="exited"))
    assert len(bench.newest("job-2").placements) == 2


def test_a_worker_that_was_stopped_before_it_was_seen_holds_its_slot_until_its_agent_answers() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.tell(JobChangeRequested("c1", JobStop(job_id="job-1")))
    bench.submit(2)
    assert bench.beat() == [StopWorkers("job-1", "host-1", 1, (0,))]
    bench.beat(gone(0, kind="not started"))
    assert bench.newest("job-2").placements


def test_a_joiner_that_fails_is_withdrawn_and_tried_again_later() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.host("host-2", 1)
    assert [p.worker for p in bench.newest().placements] == [0, 1]
    joiner = worker(1, 0)
    bench.beat(joiner, host="host-2")
    bench.beat(gone(1, 0, kind="failed"), host="host-2")
    assert [p.worker for p in bench.newest().placements] == [0]
    assert "worker 1 on host-2/0 failed: why" in bench.newest().reason
    bench.switch(iteration=3)
    bench.now += 4.0
    bench.tell(Tick())
    assert [p.worker for p in bench.newest().placements] == [0]
    bench.now += 2.0
    bench.tell(Tick())
    assert [p.worker for p in bench.newest().placements] == [0, 2], "a new id"
    assert bench.newest().reason == "host-2 is tried again"


def joining(bench: Bench, *hosts: str) -> list[int]:
    """A worker joins on each of ``hosts``, whose scripts have not reached the training call; return the newest ids."""
    for host in hosts:
        bench.host(host, 1)
    for placement in bench.newest().placements:
        if placement.host in hosts:
            bench.beat(worker(placement.worker, placement.slot), host=placement.host)
    return numbers(bench)


def numbers(bench: Bench) -> list[int]:
    return [placement.worker for placement in bench.newest().placements]


def test_a_joiner_that_fails_is_withdrawn_without_those_that_join_with_it() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    assert joining(bench, "host-2", "host-3") == [0, 1, 2]
    bench.beat(gone(1, 0, kind="failed"), host="host-2")
    assert numbers(bench) == [0, 2]


def test_a_shrink_does_not_wait_for_joiners_that_are_not_ready() -> None:
    bench = Bench(1, 1)
    bench.submit()
    bench.beat(worker(0, 0))
    bench.beat(worker(1, 0), host="host-2")
    bench.switch()
    assert joining(bench, "host-3") == [0, 1, 2]
    bench.host("host-2", 1, state=HostState.DRAINING)
    assert numbers(bench) == [0]


def test_joiners_take_over_from_members_that_all_have_to_leave() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    assert joining(bench, "host-2") == [0, 1]
    bench.host("host-1", 1, state=HostState.DRAINING)
    assert numbers(bench) == [1]


def test_a_growth_waits_until_the_shrink_before_it_is_active() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    assert numbers(bench) == [0]
    bench.tell(JobChangeRequested("stop", JobStop(job_id="job-2")))
    bench.host("host-2", 1)
    assert numbers(bench) == [0]
    bench.switch()
    assert numbers(bench) == [0, 2]


def test_a_joiner_that_is_never_ready_is_withdrawn_at_its_deadline() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.host("host-2", 1)
    bench.beat(worker(1, 0), host="host-2")
    bench.now += 601.0
    bench.tell(Tick())
    assert [p.worker for p in bench.newest().placements] == [0]
    assert "not ready after 600 seconds" in bench.newest().reason
    commands = bench.switch(iteration=3)
    assert StopWorkers("job-1", "host-2", 1, (1,)) in commands, "no generation may name it any more"


def test_joiners_that_are_ready_and_never_come_to_train_are_withdrawn_host_by_host() -> None:
    """Which of them lacks links is not known; none is withdrawn while the members do not train on."""
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.host("host-2", 1)
    bench.host("host-3", 1)
    bench.beat(worker(1, 0, at="127.0.0.1"), host="host-2")
    bench.beat(worker(2, 0, state="ready"), host="host-3")
    assert bench.newest().has_addresses

    def pass_time(iteration: int) -> list[int]:
        bench.beat(member(iteration))
        bench.tell(Tick())
        bench.now += 30.0
        bench.tell(Tick())
        return [p.worker for p in bench.newest().placements]

    assert pass_time(10) == [0, 1, 2], "one is not ready yet, and has more time"
    bench.beat(worker(1, 0, state="ready"), host="host-2")
    assert pass_time(11) == [0, 1, 2], "training stands still"
    bench.beat(member(13))
    bench.tell(Tick())
    assert [p.worker for p in bench.newest().placements] == [0, 2]
    assert bench.newest().reason == (
        "withdrawn: worker 1 on host-2/0 is ready, but had no links to all members after 30 seconds: it is at "
        "127.0.0.1, others at h; hosts must reach each other on any port (`resile host --address`)"
    )
    assert pass_time(14) == [0, 2], "a newer generation has its own time"
    bench.switch(iteration=15)
    bench.beat(gone(1, 0, kind="exited"), host="host-2")
    bench.tell(Tick())
    assert [p.worker for p in bench.newest().placements] == [0, 2, 3], "the first is tried again"


def member(iteration: int) -> WorkerReport:
    return worker(0, state="member").model_copy(update={"iteration": iteration, "generation": 1})


def test_a_decision_that_changes_only_reasons_stores_nothing() -> None:
    bench = Bench(4)
    bench.submit(min_workers=2)
    bench.activate()
    before = bench.records["job-1"]
    bench.submit(2, min_workers=3)
    bench.tell(JobChangeRequested("c1", JobStop(job_id="job-2")))
    assert bench.scheduler.explain() == {"job-1": "all it can use"}
    assert bench.records["job-1"] is before
    assert bench.records["job-2"].reason == "requested", "a job that is over has the reason of its history"


def test_reasons_follow_each_decision() -> None:
    bench = Bench(4)
    bench.submit(min_workers=2)
    bench.activate()
    bench.submit(2, min_workers=3)
    assert bench.scheduler.explain()["job-2"] == "waiting for 3 slots: the minimums of job-1 leave fewer"
    bench.host("host-2", 4)
    assert bench.scheduler.explain()["job-2"] != bench.histories["job-2"][-1].reason


def test_an_ordered_joiner_is_not_stopped_while_it_may_become_a_member() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.host("host-2", 1)
    bench.beat(worker(1, 0), host="host-2")
    commands = bench.submit(2)
    assert [p.worker for p in bench.newest().placements] == [0]
    assert not any(isinstance(command, StopWorkers) for command in commands)
    assert bench.switch()[-1] == StopWorkers("job-1", "host-2", 1, (1,))


def test_the_loss_of_a_host_during_the_start_starts_again_elsewhere() -> None:
    bench = Bench(1, 1)
    bench.submit()
    bench.beat(worker(0, 0))
    bench.host("host-2", 1, state=HostState.LOST)
    assert bench.records["job-1"].state is JobState.QUEUED
    assert bench.histories["job-1"][-1].reason == "its start was cancelled: host-2 lost"
    bench.beat(gone(0, kind="exited"))
    assert [p.worker for p in bench.newest().placements] == [2]
    assert bench.newest().cold_start


def test_a_script_that_fails_at_once_fails_the_job() -> None:
    bench = Bench(2)
    bench.submit()
    bench.report(Failed(message="SyntaxError: invalid syntax"), worker=1)
    assert bench.records["job-1"].state is JobState.FAILED
    assert "SyntaxError" in bench.records["job-1"].reason


def test_an_older_incarnation_of_a_host_has_no_effect() -> None:
    bench = Bench(2)
    bench.submit()
    bench.activate()
    bench.host("host-2", 1, incarnation=2)
    bench.host("host-2", 1, incarnation=1, state=HostState.LOST)
    assert [p.host for p in bench.newest().placements] == ["host-1", "host-1", "host-2"]


def test_heartbeats_of_hosts_that_are_unknown_or_lost_have_no_effect() -> None:
    bench = Bench(2)
    bench.submit()
    bench.activate()
    assert bench.beat(worker(0), host="host-9") == []
    bench.host("host-1", 2, state=HostState.LOST)
    assert bench.scheduler.holders() == {}
    assert bench.beat(worker(0, state="member"), worker(1, state="member")) == []
    assert bench.scheduler.holders() == {}


def test_a_worker_on_a_slot_that_its_host_does_not_have_holds_nothing() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.beat(worker(0, state="member"), worker(7, 1))
    assert bench.scheduler.holders() == {"host-1/0": "job-1"}


def test_a_worker_on_a_slot_that_another_one_holds_holds_nothing() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.beat(worker(0, state="member"), worker(7, 0))
    assert bench.scheduler.holders() == {"host-1/0": "job-1"}
    bench.beat(gone(0, kind="killed"), worker(7, 0))
    assert bench.scheduler.holders() == {"host-1/0": "job-1"}, "it is known once the slot has no other holder"


def test_an_incarnation_that_was_lost_stays_lost() -> None:
    bench = Bench(1)
    bench.submit()
    for state in (HostState.LOST, HostState.LEFT):
        num_written = len(bench.allocations)
        bench.host("host-1", 1, state=state)
        bench.host("host-1", 1)
        bench.beat()
        assert not any(allocation.placements for allocation in bench.allocations[num_written:])
        bench.host("host-1", 1, incarnation=2)
    assert bench.newest().placements[0].incarnation == 2


def test_reports_about_jobs_that_are_unknown_or_over_have_no_effect() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    assert bench.report(Failed(message="why"), generation=1, job="job-9") == []
    bench.tell(JobChangeRequested("stop", JobStop(job_id="job-1")))
    for content in (result(), Failed(message="why"), Switched(workers=(0,), iteration=9), ready()):
        assert bench.report(content, generation=1) == []


def test_a_switch_without_a_report_follows_from_heartbeats() -> None:
    bench = Bench(1)
    bench.submit()
    bench.listen()
    member = worker(0, state="member").model_copy(update={"generation": 1, "iteration": 7})
    for _ in range(4):
        bench.beat(member)
        assert bench.records["job-1"].state is JobState.STARTING, "the report, which is exact, may be on its way"
        bench.now += 0.5
    bench.beat(member)
    assert bench.records["job-1"].state is JobState.RUNNING


def test_an_old_generation_cannot_complete_the_job() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    bench.switch(iteration=5)
    bench.report(result(), generation=1)
    assert bench.records["job-1"].completed is None
    bench.report(result(), generation=2)
    assert bench.records["job-1"].completed is not None
    bench.beat(gone(0, kind="finished"), gone(1))
    assert bench.records["job-1"].state is JobState.COMPLETED


def test_a_script_that_fails_after_training_has_failed() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.activate()
    bench.report(result(), generation=1)
    bench.beat(gone(0, kind="failed"))
    assert bench.records["job-1"].reason.endswith("after training was complete")


def test_a_script_that_fails_after_training_says_so_once_whoever_knows_it_first() -> None:
    """The agent of a worker knows that its training was complete, perhaps before the result is reported."""
    for is_reported in (False, True):
        bench = Bench(1)
        bench.submit(1)
        bench.activate()
        if is_reported:
            bench.report(result(), generation=1)
        bench.beat(gone(0, kind="exited", message=AFTER_TRAINING))
        assert bench.records["job-1"].reason.count(AFTER_TRAINING) == 1


def test_workers_that_end_without_a_result_fail_the_job() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.activate()
    bench.beat(gone(0, kind="finished"))
    for _ in range(3):
        bench.now += 3.0
        bench.tell(Tick())
        assert bench.records["job-1"].state is JobState.RUNNING, "the result may be on its way"
    bench.now += 3.0
    bench.tell(Tick())
    assert bench.records["job-1"].reason == "every worker ended, but none reported a result"


def test_a_result_that_an_agent_still_has_to_publish_is_waited_for() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.activate()
    ended = gone(0, kind="finished")
    for waiting in (3, 2, 1):
        bench.beat(ended, num_waiting=waiting)
        bench.now += 11.0
        bench.tell(Tick())
        assert bench.records["job-1"].state is JobState.RUNNING
    bench.report(result(), generation=1)
    assert bench.records["job-1"].state is JobState.COMPLETED


def test_a_result_is_waited_for_though_not_even_the_start_of_training_is_published() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.listen()
    bench.beat(gone(0, kind="finished"), num_waiting=3)
    bench.now += 11.0
    bench.tell(Tick())
    assert bench.records["job-1"].state is JobState.STARTING
    bench.switch()
    bench.report(result(), generation=1)
    assert bench.records["job-1"].state is JobState.COMPLETED


def test_a_result_that_was_lost_with_its_agent_is_computed_again() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.activate()
    bench.beat(gone(0, kind="finished"), num_waiting=1)
    bench.host("host-1", 1, state=HostState.LOST)
    bench.now += 11.0
    bench.tell(Tick())
    assert bench.records["job-1"].state is JobState.QUEUED
    reason = bench.histories["job-1"][-1].reason
    assert reason.startswith("host-1 was lost, perhaps with the result: no worker is left, so it starts again")


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING, JobState.PAUSED])
def test_a_result_that_comes_late_completes_a_job_that_was_to_start_again(state: JobState) -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.activate()
    if state is JobState.PAUSED:
        bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1")))
    bench.host("host-1", 1, state=HostState.LOST)
    if state is JobState.STARTING:
        bench.host("host-2", 1)
    assert bench.records["job-1"].state is state
    bench.report(result(), generation=1)
    assert bench.records["job-1"].state is JobState.COMPLETED
    assert bench.records["job-1"].completed is not None
    assert bench.newest().placements == ()


def test_a_result_that_comes_when_the_job_trains_again_is_too_late() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.activate()
    bench.host("host-1", 1, state=HostState.LOST)
    bench.host("host-2", 1)
    bench.beat(worker(bench.newest().placements[0].worker, 0), host="host-2")
    bench.switch()
    bench.report(result(), generation=1)
    assert bench.records["job-1"].completed is None


def test_a_job_without_a_maximum_starts_with_no_more_workers_than_shards() -> None:
    bench = Bench(4)
    bench.submit(max_workers=10_000)
    bench.listen()
    assert not any(allocation.has_addresses for allocation in bench.allocations), "its shards are not known yet"
    bench.report(ready(2), worker=0)
    assert bench.newest().has_addresses
    assert len(bench.newest().placements) == 2


def test_a_job_starts_with_fewer_workers_than_its_minimum_if_it_has_fewer_shards() -> None:
    bench = Bench(4)
    bench.submit(min_workers=3, max_workers=10_000)
    bench.listen()
    bench.report(ready(2), worker=0)
    assert bench.newest().has_addresses
    assert len(bench.newest().placements) == 2


def test_initial_members_that_make_different_training_calls_fail_the_job() -> None:
    bench = Bench(2)
    bench.submit()
    bench.listen()
    bench.report(ready(), worker=0)
    bench.report(ready().model_copy(update={"epochs": 7}), worker=1)
    assert bench.records["job-1"].state is JobState.FAILED
    assert "it disagrees with worker 0 on epochs (7 instead of 1)" in bench.records["job-1"].reason


def test_initial_members_that_declare_different_ranges_of_batches_fail_the_job() -> None:
    bench = Bench(2)
    bench.submit()
    bench.listen()
    bench.report(ready(), worker=0)
    bench.report(ready().model_copy(update={"batch_range": BatchRange(least=96, most=384)}), worker=1)
    assert "it disagrees with worker 0 on batch range (96 to 384 instead of None)" in bench.records["job-1"].reason


@pytest.mark.parametrize(("restarted", "others"), [(False, "worker 0"), (True, "the others")])
def test_a_joiner_that_makes_another_training_call_does_not_join(restarted: bool, others: str) -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.host("host-2", 1)
    joiner = bench.newest().placements[-1]
    bench.beat(worker(joiner.worker, 0), host="host-2")
    if restarted:
        bench.restart()
    bench.report(ready().model_copy(update={"samples": 7}), worker=joiner.worker)
    assert bench.records["job-1"].state is not JobState.FAILED
    assert [p.worker for p in bench.newest().placements] == [0]
    assert f"it disagrees with {others} on samples (7 instead of 19200)" in bench.newest().reason


def test_a_start_that_failed_on_the_only_host_is_tried_there_again_at_once() -> None:
    bench = Bench(1)
    bench.submit()
    bench.beat(gone(0, 0, kind="not started"))
    assert [p.worker for p in bench.newest().placements] == [1]


def test_a_drain_ends_at_its_deadline_what_has_not_left() -> None:
    bench = Bench(1, 1)
    bench.submit()
    bench.beat(worker(0, 0))
    bench.beat(worker(1, 0), host="host-2")
    bench.report(ready(), worker=0)
    bench.switch()
    record = bench.hosts["host-2"]
    draining = {"state": HostState.DRAINING, "drain_deadline": at(bench.now + 30)}
    bench.tell(record.model_copy(update=draining))
    assert not bench.newest().is_recovery, "at first it is asked to leave at a boundary"
    bench.now += 29
    bench.tell(Tick())
    assert not bench.newest().is_recovery
    bench.now += 1
    commands = bench.tell(Tick())
    assert bench.newest().is_recovery
    assert [p.worker for p in bench.newest().placements] == [0]
    assert StopWorkers("job-1", "host-2", 1, (1,)) in commands
    assert "host-2 reached its drain deadline" in bench.newest().reason


def test_a_pause_is_asked_for_until_a_checkpoint_is_saved() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    assert bench.tell(JobChangeRequested("c1", JobPause(job_id="job-1")))[-1] == PauseWorkers("job-1", 1, ("host-1",))
    bench.now += 5.0
    assert PauseWorkers("job-1", 1, ("host-1",)) in bench.tell(Tick())


def test_a_new_scheduler_continues_with_what_is_stored() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    before = bench.newest()
    bench.restart()
    assert bench.newest() == before.model_copy(update={"epoch": 2}), "nothing changes but the epoch"
    assert bench.submit(1) == [Reply("submit-1", Accepted(job_id="job-1"))]
    bench.submit(2)
    bench.switch(iteration=9)
    bench.beat(worker(0, state="member"), gone(1))
    assert bench.newest("job-2").placements[0].slot == 1


@pytest.mark.parametrize("num_stored", [0, 1, 2])
def test_a_crash_while_a_slot_is_handed_on_does_not_matter(num_stored: int) -> None:
    """A worker ends, and its slot goes to another job at once: so many of the two allocations were stored."""
    bench = Bench(1)
    bench.submit(1)
    bench.listen()
    bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1")))
    bench.submit(2)
    bench.beat(gone(0, 0, kind="killed"))
    bench.listen(job="job-2")
    bench.tell(JobChangeRequested("resume", JobResume(job_id="job-1")))
    before = list(bench.allocations)
    (ended,) = bench.newest("job-2").placements
    commands = bench.beat(gone(ended.worker, 0, job="job-2", kind="killed"))
    handed_on = [command.allocation for command in commands if isinstance(command, WriteAllocation)]
    assert [allocation.has_addresses for allocation in handed_on] == [False, True], "job-1 takes what job-2 gives up"
    bench.allocations = before + handed_on[:num_stored]
    bench.restart()
    bench.beat()
    assert bench.newest("job-1").placements[0].slot_name == "host-1/0"
    assert not bench.newest("job-2").placements


def test_a_job_keeps_the_slot_that_another_one_gave_up_though_the_bus_did_not_store_that() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.listen()
    before = bench.newest("job-1")
    bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1")))
    bench.submit(2)
    bench.beat(gone(0, 0, kind="killed"))
    assert not bench.newest("job-1").placements
    (placement,) = bench.newest("job-2").placements
    for held_first in (before, bench.newest("job-2")):
        newest = {"job-1": before, "job-2": bench.newest("job-2")}
        bench.allocations = [newest.pop(held_first.job), *newest.values()]
        bench.restart()
        bench.beat(worker(placement.worker, 0, job="job-2"))
        assert bench.newest("job-2").placements[0].worker == placement.worker
        assert bench.scheduler.holders() == {"host-1/0": "job-2"}


@pytest.mark.parametrize("reached", ["submit", "listen", "activate"])
def test_a_new_scheduler_copes_with_a_host_whose_record_is_gone(reached: str) -> None:
    bench = Bench(2)
    bench.submit()
    if reached != "submit":
        getattr(bench, reached)()
    bench.hosts.clear()
    bench.restart()
    assert not bench.scheduler.holders()
    bench.host("host-2", 2)
    bench.beat(host="host-2")
    bench.now += 60.0
    bench.tell(Tick())
    assert [placement.host for placement in bench.newest().placements] == ["host-2"] * 2


def test_a_worker_that_an_earlier_scheduler_dropped_holds_its_slot_until_it_is_gone() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    bench.switch()
    bench.restart()
    assert "job-2" not in {a.job for a in bench.allocations}, "what runs on the host is not known yet"
    bench.beat(worker(0, state="member"), worker(1, state="left"))
    assert "job-2" not in {a.job for a in bench.allocations}
    bench.beat(worker(0, state="member"), gone(1))
    assert bench.newest("job-2").placements[0].slot == 1


def result() -> Completed:
    return Completed(
        iteration=100,
        epoch=0,
        samples_seen=1,
        loss=0.1,
        metrics={},
        validation={},
        params_sha256="0" * 64,
        model=None,
        ledger=(),
        bits="same bits",
    )


class AnyOrder(RuleBasedStateMachine):
    """Jobs, commands, hosts and a bus that loses, doubles and delays: the rules hold, and every job ends."""

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        self.begin_with(SimulatedPool(), seed)

    def begin_with(self, sim: SimulatedPool, seed: int) -> None:
        """Begin with a pool that has neither hosts nor jobs."""
        self.sim = sim
        self.checker = Checker(sim)
        self.random = Random(seed)
        self.hosts = {"host-1": 0, "host-2": 0, "host-3": 0}
        self.num_requests = 0
        self.sim.channel = self.channel
        for host in self.hosts:
            self.add_host(host)

    def add_host(self, host: str) -> None:
        """Add a host, or let it come back."""
        self.hosts[host] += 1
        self.sim.add_host(host, 3, incarnation=self.hosts[host])

    def channel(self, event: Event) -> Iterable[Event]:
        """Heartbeats may be lost; the bus keeps reports until they arrive, but not in order, and perhaps twice."""
        chance = self.random.random()
        if chance < 0.15:
            if isinstance(event, Report) and not isinstance(event.content, Switched):
                self.sim.later(self.random.random() * 2, lambda: self.sim.handle(event))
            return ()
        if chance < 0.3:
            scheduler = self.sim.scheduler
            self.sim.later(self.random.random() * 3, lambda: self.late(event, scheduler))
        return (event,)

    def late(self, event: Event, scheduler: Scheduler) -> None:
        """A report is kept for the next scheduler; a heartbeat reaches only the one that ran when it was sent."""
        if isinstance(event, Report) or scheduler is self.sim.scheduler:
            self.sim.handle(event)

    def ask(self, request: JobPriority | JobStop | JobPause | JobResume) -> None:
        self.num_requests += 1
        asked = JobChangeRequested(f"request-{self.num_requests}", request)
        self.sim.handle(asked)
        if self.random.random() < 0.3:
            self.sim.handle(asked)

    def job(self) -> str:
        return self.random.choice(sorted(self.sim.records))

    @rule(
        least=st.integers(1, 4), extra=st.integers(0, 8), iterations=st.integers(1, 60), shards=st.sampled_from([4, 24])
    )
    def a_job_comes(self, least: int, extra: int, iterations: int, shards: int) -> None:
        name = f"job-{len(self.sim.records) + 1}"
        if len(self.sim.records) < 5:
            asked = spec(min_workers=least, max_workers=least + extra)
            self.sim.submit([Submission(0.0, name, asked, Sharded(iterations, shards))])
            self.sim.run(until=self.sim.now - self.sim.start, watch=self.checker.check)

    @precondition(lambda self: self.sim.records)
    @rule(priority=st.integers(1, 20_000))
    def a_priority_changes(self, priority: int) -> None:
        self.ask(JobPriority(job_id=self.job(), priority=priority))

    @precondition(lambda self: self.sim.records)
    @rule()
    def a_job_is_paused(self) -> None:
        self.ask(JobPause(job_id=self.job()))

    @precondition(lambda self: self.sim.records)
    @rule()
    def a_job_is_resumed(self) -> None:
        self.ask(JobResume(job_id=self.job()))

    @precondition(lambda self: len(self.sim.records) > 2)
    @rule()
    def a_job_is_stopped(self) -> None:
        self.ask(JobStop(job_id=self.job()))

    @rule(host=st.sampled_from(["host-2", "host-3"]), state=st.sampled_from(["draining", "lost"]))
    def a_host_goes(self, host: str, state: str) -> None:
        if self.sim.hosts[host].state in (HostState.UP, HostState.DRAINING):
            self.sim.change_host(host, HostState(state))

    @precondition(lambda self: self.sim.records)
    @rule(kind=st.sampled_from(["killed", "killed", "out of memory", "failed"]))
    def a_worker_dies(self, kind: str) -> None:
        job = self.job()
        if living := self.sim.alive(job):
            self.sim.kill(job, self.random.choice(living), kind=kind)

    @rule(host=st.sampled_from(["host-2", "host-3"]))
    def a_host_returns(self, host: str) -> None:
        if self.sim.hosts[host].state not in (HostState.UP, HostState.DRAINING):
            self.add_host(host)

    @rule(host=st.sampled_from(["host-2", "host-3"]))
    def a_host_is_undrained(self, host: str) -> None:
        if self.sim.hosts[host].state is HostState.DRAINING:
            self.sim.change_host(host, HostState.UP)

    @rule()
    def the_scheduler_restarts(self) -> None:
        self.sim.restart_scheduler()

    @rule()
    def the_pool_is_about_to_stop(self) -> None:
        self.sim.handle(PoolSuspendRequested("suspend", self.sim.scheduler.epoch))

    @rule(seconds=st.floats(0.01, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.sim.run(until=self.sim.now - self.sim.start + seconds, watch=self.checker.check)
        self.sim.now += seconds / 2
        self.sim.send_heartbeats()

    @invariant()
    def the_rules_hold(self) -> None:
        if hasattr(self, "sim"):
            self.checker.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.channel = lambda event: (event,)
        self.sim.restart_scheduler()  # one that may start jobs again
        for host in ("host-2", "host-3"):
            self.sim.change_host(host, HostState.LOST)
            self.add_host(host)
        for job in list(self.sim.records):
            self.ask(JobResume(job_id=job))
        for _ in range(120):
            self.sim.run(until=self.sim.now - self.sim.start + 5.0, watch=self.checker.check)
            self.sim.now += 1.0
            self.sim.send_heartbeats()
        states = {record.job: record.state for record in self.sim.records.values()}
        assert all(state.is_final for state in states.values()), states
        for record in self.sim.records.values():
            assert record.state is not JobState.FAILED or "worker" in record.reason, "only its workers fail a job"
        for _ in range(3):
            self.sim.run(watch=self.checker.check)
            self.sim.send_heartbeats()
        assert self.sim.scheduler.holders() == {}, "the end of a job frees all its slots"
        assert not any(self.sim.assigned.values()), "no host watches the allocations of jobs that have ended"


AnyOrder.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestAnyOrder = AnyOrder.TestCase
