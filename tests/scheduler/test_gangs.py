"""Gangs: all their workers at once, the same ones to the end, and never taken from unless they can start again."""

import pytest

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import JobChangeRequested, PoolSuspendRequested, Reply, Tick
from resile_scheduler.core.gangs import MAX_RESTARTS, STEADY_SECONDS
from resile_scheduler.policies.table import POLICIES
from resile_shared.messages.allocations import Loss
from resile_shared.messages.commands import JobPause, JobResume, Refused
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import Failed

from .test_core import Bench, gone, result, worker

GANG = {"gang": True, "min_workers": 3, "max_workers": 3}


def running(*, restartable: bool = False, bench: Bench | None = None) -> Bench:
    """Two hosts, and a gang on two slots of the first and one of the second."""
    bench = bench or Bench(2, 2)
    bench.submit(**GANG, restartable=restartable)
    start(bench)
    return bench


def start(bench: Bench, job: str = "job-1") -> None:
    """Let all workers of the newest generation listen, and the first report that they run."""
    listen(bench, job)
    bench.switch(job=job)


def listen(bench: Bench, job: str = "job-1") -> None:
    """Let all workers of the newest generation listen: then they have their order."""
    for host in ("host-1", "host-2"):
        here = [placement for placement in bench.newest(job).placements if placement.host == host]
        bench.beat(*(worker(p.worker, p.slot, job=job) for p in here), host=host)


def state(bench: Bench, job: str = "job-1") -> JobState:
    return bench.records[job].state


def end_all(bench: Bench, *, kind: str = "failed", job: str = "job-1") -> None:
    """All workers of the newest membership end."""
    placements = [a for a in bench.allocations if a.job == job and a.placements][-1].placements
    for host in ("host-1", "host-2"):
        here = [placement for placement in placements if placement.host == host]
        bench.beat(*(gone(p.worker, p.slot, job=job, kind=kind) for p in here), host=host)
    bench.tell(Tick())


def later(bench: Bench, seconds: float) -> None:
    bench.now += seconds
    bench.tell(Tick())


def test_a_gang_starts_with_all_its_slots_at_once_and_without_a_training_call() -> None:
    bench = Bench(2)
    bench.submit(**GANG)
    assert state(bench) is JobState.QUEUED
    assert not bench.allocations
    bench.host("host-2", 1)
    bench.beat(host="host-2")
    allocation = bench.newest()
    assert (len(allocation.placements), allocation.gang) == (3, True)
    start(bench)
    assert state(bench) is JobState.RUNNING


def test_it_completes_when_its_first_rank_reports_and_all_have_ended() -> None:
    bench = running()
    bench.report(result(), generation=1)
    assert state(bench) is JobState.RUNNING
    end_all(bench, kind="finished")
    assert state(bench) is JobState.COMPLETED


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize("reports_first", [False, True])
def test_it_is_not_complete_if_a_rank_is_lost_before_its_script_has_ended(
    restartable: bool, reports_first: bool
) -> None:
    bench = running(restartable=restartable)
    rank_0, rank_1, rank_2 = bench.newest().placements
    if reports_first:
        bench.report(result(), worker=rank_0.worker, generation=1)
    bench.beat(gone(rank_2.worker, rank_2.slot, kind="killed"), host=rank_2.host)
    if not reports_first:
        bench.report(result(), worker=rank_0.worker, generation=1)
    ended = [gone(p.worker, p.slot, kind="finished") for p in (rank_0, rank_1)]
    bench.beat(*ended, host=rank_0.host)
    bench.tell(Tick())
    assert state(bench) is (JobState.STARTING if restartable else JobState.FAILED)
    assert bench.records["job-1"].completed is None
    assert "was killed" in " ".join(item.reason for item in bench.histories["job-1"])


def test_a_late_result_of_one_rank_does_not_complete_a_gang_that_starts_again() -> None:
    bench = running(restartable=True)
    first = bench.newest().placements[0].worker
    end_all(bench, kind="killed")
    assert bench.newest().generation > 1
    bench.report(result(), worker=first, generation=1)
    assert state(bench) is JobState.STARTING


def test_it_neither_grows_nor_moves_nor_shrinks() -> None:
    bench = running()
    num_written = len([a for a in bench.allocations if a.job == "job-1"])
    bench.host("host-3", 8)
    bench.beat(host="host-3")
    bench.submit(2, priority=1_000_000)
    later(bench, 120)
    assert len([a for a in bench.allocations if a.job == "job-1"]) == num_written


def by_priority() -> Bench:
    bench = Bench(2, 2)
    bench.scheduler = Scheduler(epoch=1, secret="s", policy=POLICIES["priority"])
    for host in list(bench.hosts.values()):
        bench.tell(host)
    for name in bench.hosts:
        bench.beat(host=name)
    return bench


@pytest.mark.parametrize("restartable", [False, True])
def test_a_job_of_higher_priority_gets_its_slots_only_if_it_can_start_again(restartable: bool) -> None:
    bench = running(restartable=restartable, bench=by_priority())
    bench.submit(2, min_workers=3, priority=9000)
    reason = bench.scheduler.explain()["job-2"]
    assert reason.startswith("waiting for slots that other" if restartable else "waiting for 3 slots")
    assert state(bench) is (JobState.QUEUED if restartable else JobState.RUNNING)
    end_all(bench, kind="left")
    if restartable:
        assert len(bench.newest("job-2").placements) >= 3
        assert state(bench) is JobState.QUEUED


def test_a_gang_that_loses_a_worker_fails_with_the_reason() -> None:
    bench = running()
    bench.beat(worker(0, 0), gone(1, 1, kind="killed"))
    later(bench, 5.9)
    assert state(bench) is JobState.RUNNING, "what else fails with it may be the cause"
    later(bench, 0.2)
    assert state(bench) is JobState.FAILED
    assert "worker 1 on host-1/1 was killed by SIGSEGV" in bench.records["job-1"].reason
    assert "--restartable" in bench.records["job-1"].reason


def test_the_cause_is_the_lost_host_and_not_what_other_scripts_say_of_it() -> None:
    bench = running(restartable=True)
    bench.report(Failed(message="connection closed by peer"), worker=0, generation=1)
    bench.now += 3
    lost = bench.hosts["host-2"].model_copy(update={"state": HostState.LOST, "since": at(bench.now)})
    bench.tell(lost)
    later(bench, 3.1)
    assert state(bench) is JobState.QUEUED
    assert bench.records["job-1"].reason.startswith("host-2 lost: all its workers start again")
    assert bench.histories["job-1"][-1].loss == Loss(reason="host-2 lost", host="host-2")
    assert bench.records["job-1"].failures.recoveries == 0, "it is not the script's fault"


def test_the_cause_is_the_first_error() -> None:
    bench = running()
    bench.report(Failed(message="ValueError: bad sample"), worker=1, generation=1)
    bench.now += 0.1
    bench.report(Failed(message="connection closed by peer"), worker=0, generation=1)
    end_all(bench)
    assert "bad sample" in bench.records["job-1"].reason


def test_a_restartable_gang_fails_when_its_script_fails_again_and_again() -> None:
    bench = running(restartable=True)
    for _ in range(MAX_RESTARTS):
        end_all(bench)
        assert state(bench) in (JobState.QUEUED, JobState.STARTING)
        later(bench, 300)
        start(bench)
    end_all(bench)
    assert state(bench) is JobState.FAILED
    assert bench.records["job-1"].reason.startswith(f"it has failed {MAX_RESTARTS + 1} times in a row: worker")


def test_failures_far_apart_are_not_in_a_row() -> None:
    bench = running(restartable=True)
    for _ in range(MAX_RESTARTS + 2):
        later(bench, STEADY_SECONDS)
        end_all(bench)
        start(bench)
    assert state(bench) is JobState.RUNNING


def test_the_new_workers_start_when_all_old_ones_are_gone() -> None:
    bench = running(restartable=True)
    bench.beat(worker(0, 0), gone(1, 1, kind="failed"))
    later(bench, 6.1)
    assert state(bench) is JobState.QUEUED
    assert not bench.newest().placements
    end_all(bench)
    assert [p.worker for p in bench.newest().placements] == [3, 4, 5]
    assert bench.newest().cold_start


@pytest.mark.parametrize("restartable", [False, True])
def test_a_gang_can_be_paused_only_if_it_can_start_again(restartable: bool) -> None:
    bench = running(restartable=restartable)
    (reply,) = [c for c in bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1"))) if isinstance(c, Reply)]
    if not restartable:
        assert isinstance(reply.answer, Refused)
        assert state(bench) is JobState.RUNNING
        return
    assert state(bench) is JobState.PAUSED
    end_all(bench, kind="left")
    bench.tell(JobChangeRequested("resume", JobResume(job_id="job-1")))
    start(bench)
    assert state(bench) is JobState.RUNNING


def test_a_pool_that_stops_does_not_wait_for_a_gang() -> None:
    for restartable, expected in ((True, JobState.QUEUED), (False, JobState.FAILED)):
        bench = running(restartable=restartable)
        bench.tell_once(PoolSuspendRequested("suspend", epoch=1))
        assert state(bench) is expected


@pytest.mark.parametrize("restartable", [False, True])
def test_a_gang_leaves_a_host_that_is_drained_only_if_it_can_start_again(restartable: bool) -> None:
    bench = running(restartable=restartable)
    bench.host("host-3", 2)
    bench.beat(host="host-3")
    bench.host("host-2", 2, state=HostState.DRAINING)
    assert state(bench) is (JobState.QUEUED if restartable else JobState.RUNNING)
    if restartable:
        end_all(bench, kind="left")
        assert {p.host for p in bench.newest().placements} == {"host-1", "host-3"}


def test_a_start_that_lacks_a_worker_is_cancelled_as_a_whole() -> None:
    bench = Bench(2, 2)
    bench.submit(**GANG)
    first = {p.worker for p in bench.newest().placements}
    bench.host("host-3", 2)
    bench.beat(host="host-3")
    bench.host("host-2", 2, state=HostState.DRAINING)
    assert not {p.worker for p in bench.newest().placements} & first


def test_a_gang_whose_scripts_may_run_already_is_not_called_back() -> None:
    bench = by_priority()
    bench.submit(**GANG)
    listen(bench)
    bench.submit(2, min_workers=3, priority=9000)
    assert len(bench.newest().placements) == 3
    assert bench.scheduler.explain()["job-2"].startswith("waiting for 3 slots"), "and not for those of the gang"
    (reply,) = [c for c in bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1"))) if isinstance(c, Reply)]
    assert isinstance(reply.answer, Refused)
    bench.switch()
    assert state(bench) is JobState.RUNNING


def test_a_worker_that_ends_before_the_gang_is_known_to_run_ends_it() -> None:
    bench = Bench(2, 2)
    bench.submit(**GANG)
    listen(bench)
    bench.beat(worker(0, 0), gone(1, 1, kind="killed"))
    later(bench, 6.1)
    assert state(bench) is JobState.FAILED


def test_a_new_scheduler_takes_a_gang_over() -> None:
    bench = running()
    bench.restart()
    start_again = [a for a in bench.allocations if a.job == "job-1"]
    bench.beat(*(worker(number, number, state="member") for number in (0, 1)))
    bench.beat(worker(2, 0, state="member"), host="host-2")
    later(bench, 60)
    assert [a for a in bench.allocations if a.job == "job-1"] == start_again
    assert state(bench) is JobState.RUNNING
