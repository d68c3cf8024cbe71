"""Deadlines: a job that would miss its own comes first, if it can still meet it, and nobody waits for that."""

from dataclasses import replace
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import given

from resile_scheduler.policies.deadlines import with_needed, workers_needed
from resile_scheduler.policies.demand import Demand, Policy
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.goodput import goodput
from resile_scheduler.policies.ranked import priority
from resile_scheduler.policies.throughput import Line, Throughput
from resile_shared.messages.commands import Refused
from resile_shared.messages.message import at

from .test_core import Bench, Reply
from .test_policies import demand, demands, possible, slots, workers

MEASURED = Throughput(compute=Line(0.0, 0.001), num_measured=1)
"""With a batch of 100, an iteration takes a tenth of a second on one worker."""


def training(number: int, *, within: float | None = None, **fields: object) -> Demand:
    """A job that takes 1,000 seconds on one worker."""
    job = replace(demand(number, most=8), throughput=MEASURED, batch_size=100, iterations_total=10_000)
    return replace(job, deadline_seconds=within, **fields)


def test_the_fewest_workers_that_are_in_time_are_needed() -> None:
    assert workers_needed(training(1)) is None
    assert workers_needed(training(1, within=2000.0)) == 1
    assert workers_needed(training(1, within=300.0)) == 4, "a tenth is kept in reserve"
    assert workers_needed(training(1, within=300.0, sizes=(1, 2, 8))) == 8
    assert workers_needed(training(1, within=300.0, iteration=8000)) == 1
    assert workers_needed(training(1, within=100.0)) is None, "it cannot be met"
    assert workers_needed(training(1, within=-1.0)) is None
    assert workers_needed(training(1, within=300.0, throughput=None)) is None, "nothing is known of it"


@pytest.mark.parametrize("policy", [elastic_batch, goodput])
def test_a_job_that_would_miss_its_deadline_gets_what_it_needs(policy: Policy) -> None:
    others = [training(number) for number in (1, 2, 3)]
    without = policy([*others, training(4)], 8)["job-4"].workers
    assert without == 2
    assert policy([*others, training(4, within=300.0)], 8)["job-4"].workers >= 4
    assert policy([*others, training(4, within=100.0)], 8)["job-4"].workers == without, "too late"
    assert policy([*others, training(4, within=900.0)], 8)["job-4"].workers == without, "it has time"


def test_among_equals_the_earliest_deadline_that_can_be_met_takes_all_it_can_use() -> None:
    jobs = [training(1), training(2, within=400.0), training(3, within=300.0), training(4, within=10.0)]
    assert workers(priority(jobs, 11)) == [1, 1, 8, 1]
    assert workers(priority([replace(jobs[0], priority=6000), *jobs[1:]], 11)) == [8, 1, 1, 1]


@given(jobs=demands(), num_slots=slots, data=st.data())
def test_nobody_waits_because_of_the_deadline_of_another(
    jobs: list[Demand], num_slots: int, data: st.DataObject
) -> None:
    wishes = st.none() | st.floats(-10.0, 1000.0)
    jobs = [
        replace(j, throughput=MEASURED, batch_size=100, iterations_total=1000, deadline_seconds=data.draw(wishes))
        for j in jobs
    ]
    raised = with_needed(jobs, num_slots)
    assert [job.job for job in raised] == [job.job for job in jobs]
    assert all(before.least <= after.least for before, after in zip(jobs, raised, strict=True))
    if raised != jobs:
        assert sum(possible(job)[0] for job in raised if possible(job)) <= num_slots


def test_a_deadline_that_has_passed_is_refused_once() -> None:
    bench = Bench(2)
    (reply,) = bench.submit(deadline=at(bench.now - 1.0))
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, Refused)
    assert reply.answer.reason.endswith("has passed: give a later one")
    bench.submit(2, deadline=at(bench.now) + timedelta(hours=1))
    assert "job-2" in bench.records
