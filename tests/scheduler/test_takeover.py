"""A new scheduler goes on with what it finds in storage, as the one before would have."""

import pytest

from resile_scheduler.core.events import JobChangeRequested, StateRestored
from resile_shared.messages.commands import JobPriority
from resile_shared.messages.jobs import JobRecord, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import CheckpointSaved, Progress

from .test_core import Bench


def training(bench: Bench) -> None:
    """Let job 1 train: its newest checkpoint is of iteration 4, and it has reached iteration 9."""
    bench.submit()
    bench.activate()
    bench.report(CheckpointSaved(lineage=1, iteration=4, num_bytes=1), generation=bench.newest().generation)
    bench.report(Progress(iteration=9, epoch=0), generation=bench.newest().generation)


def stored(bench: Bench) -> JobRecord:
    """The record of job 1, after a request that changes nothing but its priority, and adds to its history."""
    priority = bench.records["job-1"].priority + 1
    bench.tell(JobChangeRequested(f"priority {priority}", JobPriority(job_id="job-1", priority=priority)))
    return bench.records["job-1"]


def test_a_job_that_trains_is_not_set_back() -> None:
    bench = Bench(2)
    training(bench)
    assert stored(bench).iteration == 9
    bench.now += 1
    bench.restart()
    assert stored(bench).iteration == 9


def test_a_job_without_workers_goes_back_to_its_newest_checkpoint() -> None:
    bench = Bench(2)
    training(bench)
    assert stored(bench).iteration == 9
    given_up = bench.newest().model_copy(update={"placements": (), "generation": bench.newest().generation + 1})
    bench.allocations.append(given_up)
    bench.hosts.clear()
    bench.restart()
    bench.now += 1
    record = stored(bench)
    assert record.state is JobState.QUEUED
    assert record.iteration == 4


def test_an_allocation_without_a_readable_record_holds_up_no_other_job() -> None:
    bench = Bench(2)
    training(bench)
    unreadable = bench.newest().model_copy(update={"job": "job-9"})
    hosts = tuple(bench.hosts.values())
    bench.scheduler = bench.new_scheduler(epoch=2, secret="s")
    bench.tell(StateRestored(tuple(bench.records.values()), (unreadable, bench.newest()), hosts, last_number=9))
    assert bench.records.keys() == {"job-1"}
    assert bench.records["job-1"].state is JobState.RUNNING


@pytest.mark.parametrize("state", [JobState.RESCALING, JobState.RECOVERING])
def test_a_change_that_was_stored_in_the_record_alone_is_over(state: JobState) -> None:
    """The scheduler ended before it stored the allocation: all members of the one that is stored train."""
    bench = Bench(2)
    training(bench)
    bench.records["job-1"] = bench.records["job-1"].model_copy(update={"state": state})
    bench.restart()
    assert stored(bench).state is JobState.RUNNING


def test_how_long_a_job_waits_and_holds_slots_is_counted_through() -> None:
    bench = Bench(1)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    begun = bench.now
    bench.now += 1000
    bench.restart()
    for job, field in (("job-1", "holding_since"), ("job-2", "waiting_since")):
        assert getattr(bench.records[job], field) == at(begun), job
