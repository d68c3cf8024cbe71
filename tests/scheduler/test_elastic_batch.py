"""Slots and batches together: the arithmetic of small cases, and what holds for all."""

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from resile_scheduler.policies.demand import BatchRange, Demand, Target
from resile_scheduler.policies.elastic_batch import ENOUGH, elastic_batch
from resile_scheduler.policies.throughput import Correction, Line, Throughput

COMMUNICATES = Throughput(
    compute=Line(0.0, 0.001), exchange=Line(0.05, 0.0), exchange_across=Line(0.2, 0.0), num_measured=4
)
COMPUTES = Throughput(compute=Line(0.0, 0.001), num_measured=4)


def demand(number: int = 1, *, least: int = 1, most: int = 100, **fields: object) -> Demand:
    return replace(Demand(f"job-{number}", number, 5000, least, most, batch_size=64), **fields)


def workers(targets: dict[str, Target]) -> list[int]:
    return [target.workers for target in targets.values()]


def test_jobs_that_were_not_measured_share_equally() -> None:
    jobs = [demand(number) for number in (1, 2, 3)]
    assert workers(elastic_batch(jobs[:1], 8)) == [8]
    assert workers(elastic_batch(jobs, 12)) == [4, 4, 4]
    assert elastic_batch(jobs, 12)["job-1"].reason == (
        "expected to be 4.0 times as fast as on 1 slot: all jobs together gain most this way"
    )


def test_slots_go_where_they_make_a_job_faster() -> None:
    jobs = [demand(1, throughput=COMMUNICATES), demand(2, throughput=COMPUTES)]
    targets = elastic_batch(jobs, 10)
    assert workers(targets) == [1, 9]
    assert targets["job-2"].reason == "9.0 times as fast as on 1 slot: all jobs together gain most this way"


def test_a_batch_that_may_grow_pays_for_the_exchange() -> None:
    batch = BatchRange(64, 1024)
    alone = elastic_batch([demand(throughput=COMMUNICATES, batch=batch, most=8)], 8)["job-1"]
    assert alone.workers == 8
    assert alone.batch_size == pytest.approx(1024, rel=0.05)
    assert alone.reason == "all it can use: 5.7 times as fast as on 1 slot with a batch of 64"
    fixed = elastic_batch([demand(throughput=COMMUNICATES, most=8)], 8)["job-1"]
    assert fixed.workers == 8
    assert fixed.batch_size is None
    assert "1.1 times as fast" in fixed.reason


def test_a_batch_does_not_grow_without_a_gain() -> None:
    targets = elastic_batch([demand(throughput=COMPUTES, batch=BatchRange(64, 1024))], 8)
    assert targets["job-1"].batch_size == 64
    assert elastic_batch([demand(batch=BatchRange(64, 1024))], 8)["job-1"].batch_size == 64


@pytest.mark.parametrize(("present", "stays"), [(800, True), (400, False)])
def test_with_the_same_workers_a_batch_stays_that_hardly_differs(present: int, stays: bool) -> None:
    job = demand(throughput=COMMUNICATES, batch=BatchRange(64, 1024), most=8)
    best = elastic_batch([job], 8)["job-1"].batch_size
    target = elastic_batch([replace(job, assigned_workers=8, batch_size=present)], 8)["job-1"]
    assert target.batch_size == (present if stays else best)
    elsewhere = elastic_batch([replace(job, assigned_workers=4, batch_size=present)], 8)["job-1"]
    assert elsewhere.batch_size == best


def test_each_worker_needs_enough_samples() -> None:
    job = demand(batch=BatchRange(8, 64, least_per_slot=8))
    target = elastic_batch([job], 16)["job-1"]
    assert (target.workers, target.batch_size) == (8, 64)
    assert elastic_batch([replace(job, least=9)], 16)["job-1"] == Target(
        0, "waiting: a batch of 64 is too small for its minimum of 9 workers"
    )


def test_the_slowest_worker_computes_whole_shards() -> None:
    throughput = Throughput(num_shards=4, compute=Line(0.0, 0.001), exchange=Line(0.05, 0.0), num_measured=1)
    job = demand(throughput=throughput, batch=BatchRange(200, 400), num_shards=4, most=4)
    assert [elastic_batch([replace(job, most=most)], 4)["job-1"].workers for most in (1, 2, 3, 4)] == [1, 2, 2, 4]


def test_an_exchange_across_hosts_is_worth_less() -> None:
    job = demand(throughput=COMMUNICATES, batch=BatchRange(64, 512))
    assert elastic_batch([job], 16)["job-1"].workers == 16
    assert elastic_batch([replace(job, slots_per_host=8)], 16)["job-1"].workers == 8


def test_only_allowed_sizes_are_given() -> None:
    jobs = [demand(number, sizes=(1, 2, 4, 8)) for number in (1, 2, 3)]
    assert sorted(workers(elastic_batch(jobs, 11))) == [1, 2, 8]
    assert elastic_batch([demand(sizes=(4, 8), most=3)], 8)["job-1"] == Target(
        0, "waiting for hosts: none of its allowed sizes is from 1 to 3"
    )


def test_a_higher_priority_is_worth_more() -> None:
    jobs = [demand(1, throughput=COMPUTES), demand(2, throughput=COMPUTES, priority=5001)]
    assert workers(elastic_batch(jobs, 8)) == [1, 7]


def test_a_slot_of_a_minimum_is_worth_what_any_other_slot_is() -> None:
    gang = demand(1, least=4, most=12, throughput=COMPUTES)
    targets = elastic_batch([gang, demand(2, throughput=COMPUTES)], 12)
    assert workers(targets) == [6, 6]
    assert targets["job-1"].reason == "6.0 times as fast as on 1 slot: all jobs together gain most this way"


def test_a_change_has_to_earn_what_it_costs() -> None:
    jobs = [
        demand(1, throughput=COMPUTES, holds_slots=True, assigned_workers=5),
        demand(2, throughput=COMPUTES, holds_slots=True, assigned_workers=3),
    ]
    costly = [replace(job, change_seconds=30.0) for job in jobs]
    assert workers(elastic_batch(jobs, 8)) == [4, 4]
    assert workers(elastic_batch(costly, 8)) == [5, 3]
    assert workers(elastic_batch([*costly, demand(3, throughput=COMPUTES)], 8))[0] == 5, "one changes for the third"
    assert sum(workers(elastic_batch(costly, 12))) == 12


@pytest.mark.parametrize(("gain", "moves"), [(0.04, False), (0.06, True)])
def test_a_change_earns_more_than_measurements_can_tell(gain: float, moves: bool) -> None:
    """The job holds 10 workers and could have 12; with them it is faster by ``gain``."""
    slower = Throughput(compute=Line(0.0, 0.001), num_measured=4)
    faster = float(slower.seconds(12, 64))
    error = np.log(float(slower.seconds(10, 64)) / (1 + gain) / faster)
    throughput = replace(slower, corrections=(Correction(12, False, (np.log(64 / 12),), (float(error),)),))
    job = demand(throughput=throughput, holds_slots=True, assigned_workers=10, change_seconds=0.01, sizes=(10, 12))
    assert workers(elastic_batch([job], 12)) == [12 if moves else 10]


def test_a_large_job_takes_the_only_idle_slot() -> None:
    """It makes the job faster by a fortieth, as everyone would expect."""
    job = demand(throughput=COMPUTES, holds_slots=True, assigned_workers=40, change_seconds=0.01)
    assert workers(elastic_batch([job], 41)) == [41]


def test_arrivals_are_admitted_one_at_a_time_while_the_minimums_fit() -> None:
    running = demand(1, least=3, holds_slots=True)
    jobs = [running, demand(2, least=6, priority=9000), demand(3, least=2), demand(4, least=2)]
    targets = elastic_batch(jobs, 6)
    assert workers(targets) == [3, 0, 3, 0]
    assert targets["job-2"].reason == "waiting for 6 slots: the minimums of job-1, job-3 leave fewer"
    assert elastic_batch([running], 0)["job-1"].reason == "waiting for a host: the pool has no slots"


throughputs = st.builds(
    Throughput,
    num_shards=st.none() | st.sampled_from([4, 8, 24]),
    compute=st.builds(Line, st.floats(0.0, 0.1), st.floats(1e-5, 0.01)),
    exchange=st.builds(Line, st.floats(0.0, 0.3), st.floats(0.0, 0.05)),
    exchange_across=st.builds(Line, st.floats(0.0, 0.5), st.floats(0.0, 0.1)),
    num_measured=st.just(3),
)
throughputs |= throughputs.flatmap(
    lambda of: st.builds(partial(replace, of, num_shards=None), micro_batch_size=st.integers(1, 300))
)


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    jobs = []
    for number in range(1, draw(st.integers(0, 6)) + 1):
        most = draw(st.integers(1, 12))
        batch = draw(st.integers(1, 256))
        jobs.append(
            demand(
                number,
                least=draw(st.integers(1, most)),
                most=most,
                priority=draw(st.integers(1, 10_000)),
                holds_slots=draw(st.booleans()),
                batch_size=batch,
                throughput=draw(st.none() | throughputs),
                batch=draw(st.none() | st.builds(BatchRange, st.just(batch), st.integers(batch, 8 * batch))),
                sizes=draw(st.none() | st.just((1, 2, 4, 8))),
                slots_per_host=draw(st.none() | st.integers(1, 8)),
            )
        )
    return jobs


slots = st.integers(0, 24)


@given(jobs=demands(), num_slots=slots)
def test_limits_are_kept(jobs: list[Demand], num_slots: int) -> None:
    targets = elastic_batch(jobs, num_slots)
    assert list(targets) == [job.job for job in jobs]
    assert sum(workers(targets)) <= num_slots
    for job in jobs:
        target = targets[job.job]
        assert target.reason
        if target.workers == 0:
            continue
        assert job.least <= target.workers <= job.most
        assert job.sizes is None or target.workers in job.sizes
        if job.batch is None:
            assert target.batch_size is None
            continue
        assert target.batch_size is not None
        assert job.batch.least <= target.batch_size <= job.batch.most


@settings(max_examples=200)
@given(jobs=demands(), num_slots=slots)
def test_a_batch_that_cannot_change_makes_no_difference(jobs: list[Demand], num_slots: int) -> None:
    """The benefit of the paper's policy is exactly zero where no batch may change."""
    fixed = [replace(job, batch=BatchRange(job.batch_size, job.batch_size)) for job in jobs]
    without = [replace(job, batch=None) for job in jobs]
    assert workers(elastic_batch(fixed, num_slots)) == workers(elastic_batch(without, num_slots))


@given(job=demands().filter(bool).map(lambda jobs: jobs[0]), num_slots=st.integers(1, 24))
def test_the_batch_has_nearly_the_highest_throughput(job: Demand, num_slots: int) -> None:
    target = elastic_batch([job], num_slots)["job-1"]
    if target.batch_size is None or job.batch is None or job.throughput is None:
        return
    across = job.slots_per_host is not None and target.workers > job.slots_per_host
    batches = np.arange(job.batch.least, job.batch.most + 1)
    rates = job.throughput.rate(target.workers, batches, across=across)
    chosen = job.throughput.rate(target.workers, target.batch_size, across=across)
    assert chosen >= ENOUGH * rates.max() * (1 - 1e-9)
    if target.batch_size > job.batch.least:
        smaller = job.throughput.rate(target.workers, target.batch_size - 1, across=across)
        assert smaller <= ENOUGH * rates.max() * (1 + 1e-9)


@pytest.mark.parametrize("exchange", [0.02, 0.3])
@pytest.mark.parametrize("limit", [1, 5, 16, 33, 64])
@pytest.mark.parametrize(("least", "most"), [(16, 16), (40, 45), (64, 512)])
def test_the_batch_is_the_smallest_that_is_enough_whatever_the_passes(
    least: int, most: int, limit: int, exchange: float
) -> None:
    """A batch that is a little larger than its passes hold is slower: its passes take nearly as long, and are more."""
    throughput = Throughput(compute=Line(0.05, 0.001), exchange=Line(exchange), num_measured=3, micro_batch_size=limit)
    batch = elastic_batch([demand(batch=BatchRange(least, most), throughput=throughput, sizes=(4,))], 4)["job-1"]
    rates = throughput.rate(4, np.arange(least, most + 1))
    assert batch.batch_size == least + (rates >= ENOUGH * rates.max()).argmax()


@given(jobs=demands(), num_slots=slots)
def test_an_idle_slot_would_make_no_job_faster(jobs: list[Demand], num_slots: int) -> None:
    targets = elastic_batch(jobs, num_slots)
    idle = num_slots - sum(workers(targets))
    for job in jobs:
        had = targets[job.job].workers
        if had and idle:
            alone = elastic_batch([job], had + idle)[job.job]
            assert _speed(job, alone) <= _speed(job, targets[job.job]) * (1 + 1e-9)


def _speed(job: Demand, target: Target) -> float:
    across = job.slots_per_host is not None and target.workers > job.slots_per_host
    throughput = job.throughput or Throughput(job.num_shards)
    return float(throughput.rate(target.workers, target.batch_size or job.batch_size, across=across))


@given(jobs=demands(), num_slots=slots, data=st.data())
def test_a_job_in_the_queue_changes_nothing(jobs: list[Demand], num_slots: int, data: st.DataObject) -> None:
    targets = elastic_batch(jobs, num_slots)
    waiting = [job for job in jobs if targets[job.job].workers == 0]
    if waiting:
        gone = data.draw(st.sampled_from(waiting))
        rest = elastic_batch([job for job in jobs if job is not gone], num_slots)
        assert workers(rest) == [targets[job.job].workers for job in jobs if job is not gone]


@pytest.mark.parametrize("exchange", [0.0, 0.05])
@pytest.mark.parametrize("fixed", [0.0, 0.05])
def test_the_best_batch_has_enough_throughput_also_where_the_exchange_overlaps(fixed: float, exchange: float) -> None:
    throughput = Throughput(compute=Line(fixed, 0.001), exchange=Line(exchange, 0.01), num_measured=4, overlap=2.0)
    for workers in (1, 2, 8):
        job = Demand(
            "job-1", 1, 5000, workers, workers, batch_size=64, batch=BatchRange(64, 4096), throughput=throughput
        )
        batch = elastic_batch([job], workers)["job-1"].batch_size
        assert batch is not None
        rates = throughput.rate(workers, np.arange(64, 4097))
        smallest = 64 + int(np.argmax(rates >= 0.99 * rates[-1]))
        assert smallest <= batch <= 1.05 * smallest + 1
