"""Which jobs' allocations the agent of each host watches: those that have a worker there, or are about to."""

from resile_scheduler.core.events import AssignJobs, Command, JobChangeRequested, WriteAllocation
from resile_shared.messages.commands import JobPause, JobPriority, JobResume, JobStop
from resile_shared.messages.hosts import HostState

from .test_core import Bench, gone, worker


def assignments(commands: list[Command]) -> list[AssignJobs]:
    return [command for command in commands if isinstance(command, AssignJobs)]


def two_hosts() -> Bench:
    """A job that trains with worker 0 on host-1 and worker 1 on host-2."""
    bench = Bench(1, 1)
    bench.submit()
    bench.beat(worker(0))
    bench.beat(worker(1, 0), host="host-2")
    bench.activate()
    return bench


def test_a_host_gets_a_job_when_a_worker_is_placed_there_after_the_allocation_is_stored() -> None:
    bench = Bench(1, 1, 1)
    assert bench.assigned == {"host-1": (), "host-2": (), "host-3": ()}, "each is told that it has none"
    commands = bench.submit(max_workers=2)
    assert assignments(commands) == [AssignJobs(f"host-{number}", 1, ("job-1",)) for number in (1, 2)]
    kinds = [type(command) for command in commands]
    assert kinds.index(WriteAllocation) < kinds.index(AssignJobs)


def test_a_host_is_told_again_until_its_heartbeat_names_the_same_jobs() -> None:
    bench = Bench(1)
    bench.submit()
    bench.assigned["host-1"] = ()  # the instruction was lost
    assert assignments(bench.beat()) == [AssignJobs("host-1", 1, ("job-1",))]
    assert assignments(bench.beat()) == []
    del bench.assigned["host-1"]
    assert assignments(bench.beat()) == [AssignJobs("host-1", 1, ("job-1",))]


def test_a_heartbeat_from_before_the_last_instruction_does_not_hide_that_it_has_to_be_changed() -> None:
    bench = Bench(2)
    bench.submit(1, min_workers=2)
    bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1")))
    bench.submit(2, max_workers=1)
    bench.beat(gone(0), gone(1))
    assert bench.assigned["host-1"] == ("job-2",)
    bench.tell(JobChangeRequested("resume", JobResume(job_id="job-1")))
    bench.assigned["host-1"] = ("job-1",)  # as the agent had it, before the instruction arrived
    commands = bench.beat(gone(0, 0, job="job-2", kind="failed"))
    assert len(bench.newest("job-1").placements) == 2
    assert assignments(commands) == [AssignJobs("host-1", 1, ("job-1",))]


def test_a_job_stays_with_a_host_until_its_last_worker_there_is_gone_and_no_generation_names_it() -> None:
    bench = two_hosts()
    bench.submit(2, max_workers=1)
    bench.tell(JobChangeRequested("c1", JobPriority(job_id="job-2", priority=100_000)))
    assert [p.worker for p in bench.newest().placements] == [0], "job-2 is to have the slot of host-2"
    assert bench.assigned["host-2"] == ("job-1",)
    bench.switch()
    assert assignments(bench.beat(worker(1, 0, state="left"), host="host-2")) == []
    commands = bench.beat(gone(1, 0), host="host-2")
    assert assignments(commands) == [AssignJobs("host-2", 1, ("job-2",))]


def test_a_job_that_ended_stays_with_a_host_until_its_workers_there_are_gone() -> None:
    bench = two_hosts()
    assert assignments(bench.tell(JobChangeRequested("c1", JobStop(job_id="job-1")))) == []
    assert assignments(bench.beat(gone(0, kind="killed"))) == [AssignJobs("host-1", 1, ())]
    assert bench.assigned["host-2"] == ("job-1",)


def test_a_new_scheduler_takes_no_job_from_a_host_before_it_knows_who_runs_there() -> None:
    bench = two_hosts()
    bench.submit(2, max_workers=1)
    bench.tell(JobChangeRequested("c1", JobPriority(job_id="job-2", priority=100_000)))
    assert [p.host for p in bench.newest().placements] == ["host-1"], "the member on host-2 has to leave"
    bench.restart()
    assert bench.assigned["host-2"] == ("job-1",)
    assert assignments(bench.beat(worker(1, 0, state="member"), host="host-2")) == []
    bench.beat(gone(1, 0), host="host-2")
    bench.switch()
    assert "job-1" not in bench.assigned["host-2"]


def test_a_new_incarnation_is_told_anew_and_a_lost_one_nothing() -> None:
    bench = two_hosts()
    before = dict(bench.assigned)
    bench.host("host-2", 1, state=HostState.LOST)
    assert bench.assigned == before
    back = bench.hosts["host-2"].model_copy(update={"state": HostState.UP, "incarnation": 2})
    assert assignments(bench.tell(back)) == [AssignJobs("host-2", 2, ("job-1",))]
