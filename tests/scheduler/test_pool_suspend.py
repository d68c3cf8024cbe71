"""A pool that is about to stop: all jobs are saved, and none starts."""

from resile_scheduler.core.events import Command, JobChangeRequested, PauseWorkers, PoolSuspendRequested, Reply
from resile_shared.messages.commands import Accepted, JobPause, Refused
from resile_shared.messages.jobs import JobState
from resile_shared.messages.reports import CheckpointSaved

from .test_core import Bench, gone, worker


def suspend(bench: Bench) -> tuple[list[Command], tuple[str, ...]]:
    """Suspend the pool; return the other commands, and the jobs that still hold slots."""
    commands = bench.tell_once(PoolSuspendRequested("suspend", bench.scheduler.epoch))
    (answer,) = [command.answer for command in commands if isinstance(command, Reply)]
    assert isinstance(answer, Accepted)
    return [command for command in commands if not isinstance(command, Reply)], answer.jobs


def saved(iteration: int) -> CheckpointSaved:
    return CheckpointSaved(lineage=1, iteration=iteration, num_bytes=1, pausing=True)


def test_jobs_that_train_are_saved_and_nothing_else_gets_their_slots() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    bench.submit(2, min_workers=2)
    commands, jobs = suspend(bench)
    assert jobs == ("job-1",)
    assert PauseWorkers("job-1", 1, ("host-1",)) in commands
    bench.report(saved(7), generation=1)
    bench.beat(gone(0), gone(1))
    bench.submit(3)
    assert suspend(bench)[1] == ()
    states = {name: record.state for name, record in bench.records.items()}
    assert states == dict.fromkeys(("job-1", "job-2", "job-3"), JobState.QUEUED)
    assert bench.histories["job-1"][-1].iteration == 7
    assert {allocation.job for allocation in bench.allocations} == {"job-1"}
    bench.restart()
    bench.beat()
    assert bench.newest().resume, "the next scheduler continues with it"


def test_a_request_that_was_meant_for_an_earlier_scheduler_suspends_nothing() -> None:
    bench = Bench(2)
    bench.submit(1)
    bench.activate()
    earlier = PoolSuspendRequested("suspend", bench.scheduler.epoch)
    bench.tell_once(earlier)
    bench.report(saved(7), generation=1)
    bench.beat(gone(0), gone(1))
    bench.restart()
    (reply,) = bench.tell_once(earlier)
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, Refused)
    bench.beat()
    assert bench.newest().resume, "the pool that runs again continues with its jobs"
    assert suspend(bench)[1] == ("job-1",), "a request that is meant for this scheduler still counts"


def test_a_job_that_was_pausing_stays_paused() -> None:
    bench = Bench(2)
    bench.submit()
    bench.activate()
    bench.tell(JobChangeRequested("c1", JobPause(job_id="job-1")))
    assert suspend(bench)[1] == ("job-1",)
    bench.report(saved(7), generation=1)
    assert suspend(bench)[1] == ()
    assert bench.records["job-1"].state is JobState.PAUSED


def test_a_start_is_cancelled_as_long_as_a_member_is_not_ready() -> None:
    for has_order in (False, True):
        bench = Bench(2)
        bench.submit(max_workers=2)
        if has_order:
            bench.beat(worker(0, state="ready"), worker(1, state="starting"))
            assert bench.newest().has_addresses
        suspend(bench)
        assert bench.records["job-1"].state is JobState.QUEUED
        assert suspend(bench)[1] == ()


def test_a_start_whose_members_are_all_ready_may_train_already_so_it_is_saved() -> None:
    bench = Bench(2)
    bench.submit(max_workers=2)
    bench.beat(worker(0, state="ready"), worker(1, state="ready"))
    suspend(bench)
    assert suspend(bench)[1] == ("job-1",)
    assert bench.records["job-1"].state is JobState.STARTING
    assert PauseWorkers("job-1", 1, ("host-1",)) in bench.switch(iteration=3)


def test_a_new_scheduler_cancels_no_start_before_it_has_heard_from_its_hosts() -> None:
    bench = Bench(2)
    bench.submit(max_workers=2)
    bench.beat(worker(0), worker(1))
    bench.restart()
    suspend(bench)
    assert suspend(bench)[1] == ("job-1",)
    bench.beat(worker(0, state="member"), worker(1, state="member"))
    assert bench.records["job-1"].state is JobState.STARTING
    bench.switch(iteration=3)
    assert bench.histories["job-1"][-1].kind == "suspending"
