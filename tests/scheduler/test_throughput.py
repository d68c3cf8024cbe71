"""The throughput model: what is measured is learnt, and what is not is taken to scale perfectly."""

import itertools
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from resile_scheduler.policies.throughput import (
    MOST_CONFIGURATIONS,
    Line,
    Measurement,
    Measurements,
    Throughput,
)

TRUE = Throughput(
    compute=Line(0.02, 0.001), exchange=Line(0.03, 0.002), exchange_across=Line(0.08, 0.004), num_measured=1
)


def measured(*configurations: tuple[int, int, int], of: Throughput = TRUE, times: int = 4) -> Measurements:
    """Return what iterations with these workers, batches and hosts measure."""
    measurements = Measurements(of.num_shards, micro_batch_size=of.micro_batch_size)
    for workers, batch, hosts in configurations:
        passes, samples = of.passes(workers, batch)
        computing = float(passes * of.compute.at(samples))
        exchanging = float(of.seconds(workers, batch, across=hosts > 1)) - computing
        for _ in range(times):
            measurements.add(Measurement(workers, batch, hosts, computing, exchanging))
    return measurements


def test_the_formula() -> None:
    assert TRUE.seconds(1, 100) == pytest.approx(0.12)
    assert TRUE.seconds(4, 100) == pytest.approx(0.02 + 0.025 + 0.03 + 2 * 0.002)
    assert TRUE.seconds(4, 100, across=True) == pytest.approx(0.02 + 0.025 + 0.08 + 2 * 0.004)
    assert TRUE.rate([1, 4], 100) == pytest.approx([100 / 0.12, 100 / 0.079])


def test_the_slowest_worker_computes_whole_shards() -> None:
    assert Throughput(num_shards=8).seconds([1, 2, 3, 4, 7, 8], 80) == pytest.approx([80, 40, 30, 20, 20, 10])


def test_a_worker_computes_what_is_too_much_for_one_pass_in_several_equal_ones() -> None:
    limited = replace(TRUE, overlap=2.0, micro_batch_size=10)
    last = (0.03**2 + 0.03**2) ** 0.5
    assert limited.seconds(2, 20) == pytest.approx(last)
    assert limited.seconds(2, 60) == pytest.approx(last + 2 * 0.03), "the exchange hides behind the last one"
    assert limited.seconds(2, 22) == pytest.approx((0.0255**2 + 0.03**2) ** 0.5 + 0.0255)
    assert limited.seconds([1, 2, 4], 20, across=True) == pytest.approx(
        [2 * 0.03, (0.03**2 + 0.08**2) ** 0.5, (0.025**2 + 0.088**2) ** 0.5]
    )
    for workers, batch in itertools.product((1, 2, 3), (20, 21, 22, 60)):
        assert limited.seconds_of(workers, batch) == pytest.approx(float(limited.seconds(workers, batch)))


@pytest.mark.parametrize("overlap", [1.0, 2.0])
def test_what_a_pass_takes_is_learnt_from_iterations_of_several(overlap: float) -> None:
    true = replace(TRUE, overlap=overlap, micro_batch_size=10)
    fitted = measured((1, 10, 1), (1, 30, 1), (2, 10, 1), (2, 60, 1), (4, 64, 1), of=true, times=16).fit()
    for workers, batch in ((1, 5), (1, 100), (2, 20), (2, 22), (4, 200)):
        expected = float(true.seconds(workers, batch))
        assert fitted.seconds(workers, batch) == pytest.approx(expected, rel=0.05)
        assert fitted.seconds_of(workers, batch) == pytest.approx(expected, rel=0.05)


def test_a_limit_that_no_share_reaches_makes_no_difference() -> None:
    configurations = (1, 64, 1), (2, 64, 1), (4, 128, 1)
    free, limited = (measured(*configurations, of=replace(TRUE, micro_batch_size=m)).fit() for m in (None, 64))
    assert replace(limited, micro_batch_size=None) == free


def test_before_anything_is_measured_a_job_scales_perfectly_and_nothing_is_known() -> None:
    unknown = Measurements().fit()
    assert unknown.rate([1, 2, 16], 64) / unknown.rate(1, 64) == pytest.approx([1, 2, 16])
    assert unknown.num_measured == 0


@given(workers=st.integers(1, 64), batch=st.integers(1, 10_000), seconds=st.floats(1e-4, 1e3))
def test_one_measurement_is_reproduced(workers: int, batch: int, seconds: float) -> None:
    measurements = Measurements()
    measurements.add(Measurement(workers, batch, 1, seconds, seconds / 3 if workers > 1 else 0.0))
    fitted = measurements.fit()
    assert fitted.seconds(workers, batch) == pytest.approx(seconds * (4 / 3 if workers > 1 else 1), rel=0.02)


def test_one_worker_says_nothing_of_an_exchange() -> None:
    fitted = measured((1, 64, 1)).fit()
    assert fitted.rate(8, 64) == pytest.approx(8 * fitted.rate(1, 64), rel=0.02)


def test_an_exchange_seen_with_two_workers_is_expected_of_more_and_across_hosts() -> None:
    fitted = measured((1, 100, 1), (2, 100, 1)).fit()
    seen = TRUE.exchange.intercept
    assert fitted.exchange.at(np.array([0.0, 6.0])) == pytest.approx([seen, seen], rel=0.05)
    assert fitted.exchange_across.at(np.array([0.0, 6.0])) == pytest.approx([seen, seen], rel=0.05)


@pytest.mark.parametrize("inside", [(), (2,), (2, 4)])
def test_how_an_exchange_grows_is_not_told_by_one_number_of_workers(inside: tuple[int, ...]) -> None:
    """Nor by how it grows on one host: else a job that is slow on two hosts would never try more."""
    fitted = measured(*((workers, 100, 1) for workers in inside), (8, 100, 2)).fit()
    eight, sixteen = fitted.exchange_across.at(np.array([6.0, 14.0]))
    assert sixteen == pytest.approx(eight)
    assert fitted.seconds(8, 100, across=True) == pytest.approx(float(TRUE.seconds(8, 100, across=True)), rel=0.05)


def test_what_was_varied_is_learnt() -> None:
    every = [(n, b, hosts) for n in (1, 2, 4, 8) for b in (64, 256) for hosts in (1, 2) if hosts <= n]
    fitted = measured(*every).fit()
    for n, b, across in [(3, 128, False), (6, 512, True), (16, 1024, True)]:
        assert fitted.seconds(n, b, across=across) == pytest.approx(float(TRUE.seconds(n, b, across=across)), rel=0.05)


def test_a_slow_iteration_changes_little() -> None:
    measurements = measured((1, 64, 1), (2, 64, 1), (4, 64, 1), times=9)
    before = measurements.fit().seconds([1, 2, 4, 8], 64)
    measurements.add(Measurement(2, 64, 1, 30.0, 12.0))
    assert measurements.fit().seconds([1, 2, 4, 8], 64) == pytest.approx(before, rel=0.02)


def test_of_a_batch_that_may_change_half_the_time_is_fixed_until_two_were_measured() -> None:
    measurements = Measurements(may_grow=True)
    measurements.add(Measurement(1, 100, 1, 1.0, 0.0))
    assert measurements.fit().seconds(1, [100, 200]) == pytest.approx([1.0, 1.5])
    for batch in (50, 200):
        measurements.add(Measurement(1, batch, 1, batch / 100, 0.0))
    assert measurements.fit().seconds(1, [100, 400]) == pytest.approx([1.0, 4.0], rel=0.05)


def test_an_exchange_that_hides_behind_the_computation_is_learnt() -> None:
    true = replace(TRUE, exchange=Line(0.1, 0.01), exchange_across=Line(0.3, 0.02), overlap=2.0)
    every = [(n, b, hosts) for n in (1, 2, 4, 8) for b in (64, 512, 2048) for hosts in (1, 2) if hosts <= n]
    fitted = measured(*every, of=true).fit()
    assert fitted.overlap == 2.0
    for n, b, across in [(3, 128, False), (6, 1024, True), (16, 8192, True)]:
        assert fitted.seconds(n, b, across=across) == pytest.approx(float(true.seconds(n, b, across=across)), rel=0.05)


def test_what_was_measured_corrects_the_lines_for_that_number_of_workers() -> None:
    measurements = measured((1, 64, 1), (2, 64, 1), (4, 64, 1), (8, 64, 1), times=16)
    for _ in range(16):
        measurements.add(Measurement(6, 64, 1, 0.3, 0.3))
    fitted = measurements.fit()
    assert fitted.seconds(6, 64) == pytest.approx(0.6, rel=0.05)
    assert fitted.seconds([2, 4], 64) == pytest.approx(TRUE.seconds([2, 4], 64), rel=0.1)
    assert fitted.seconds(6, 64, across=True) < 0.5, "nothing is known of it across hosts"


def test_what_was_measured_corrects_the_lines_for_those_samples_of_a_worker() -> None:
    measurements = measured(*((n, b, 1) for n in (1, 2, 4) for b in (64, 128, 256)), times=16)
    for _ in range(16):
        measurements.add(Measurement(4, 512, 1, 0.3, 0.3))
    fitted = measurements.fit()
    assert fitted.seconds(4, 512) == pytest.approx(0.6, rel=0.05)
    assert fitted.seconds(4, [64, 256]) == pytest.approx(TRUE.seconds(4, [64, 256]), rel=0.15)
    between = float(fitted.seconds(4, 362))
    assert float(fitted.seconds(4, 256)) < between < 0.6


@pytest.mark.parametrize(("iterations", "is_noise"), [(1, True), (16, False)])
def test_the_more_iterations_a_measurement_is_of_the_less_of_it_is_noise(iterations: int, is_noise: bool) -> None:
    measurements = measured((1, 64, 1), (2, 64, 1), (4, 64, 1), (8, 64, 1), times=16)
    seconds = 1.09 * float(TRUE.seconds(3, 64))
    measurements.add(Measurement(3, 64, 1, seconds / 2, seconds / 2, iterations))
    assert (not measurements.fit().corrections) == is_noise


measurement = st.builds(
    Measurement,
    workers=st.integers(1, 64),
    batch=st.integers(1, 4096),
    hosts=st.integers(1, 4),
    compute_seconds=st.floats(1e-6, 1e4),
    exchange_seconds=st.floats(0.0, 1e4),
)


@given(seen=st.lists(measurement, min_size=1, max_size=12), shards=st.none() | st.integers(1, 64))
def test_whatever_is_measured_times_are_positive_and_no_batch_is_slower_than_those_that_were_measured_around_it(
    seen: list[Measurement], shards: int | None
) -> None:
    """A larger batch may be slower, but only if that was measured."""
    measurements = Measurements(shards)
    for one in seen:
        measurements.add(one)
    fitted = measurements.fit()
    corrected = {(n, across): np.exp(samples) for n, across, samples, _ in fitted.corrections}
    for workers in {1, 2, 7, 64, *(n for n, _ in corrected)}:
        share = float(fitted.samples(workers, 1.0))
        for across in (False, True):
            ends = [1e-3, *(corrected.get((workers, across), np.array([])) / share), 1e6]
            for low, high in pairwise(ends):
                batches = np.geomspace(low, high, 7)
                seconds = fitted.seconds(workers, batches, across=across)
                assert (seconds > 0.0).all()
                assert np.isfinite(seconds).all()
                rates = fitted.rate(workers, batches, across=across)
                assert (rates >= min(rates[0], rates[-1]) * (1 - 1e-6)).all()
                if low == ends[0] or high == ends[-1]:
                    assert (rates[1:] >= rates[:-1] * (1 - 1e-6)).all(), "beyond what was measured a larger one is not"


def test_only_the_newest_configurations_are_kept() -> None:
    measurements = Measurements()
    for batch in range(1, 3 * MOST_CONFIGURATIONS):
        measurements.add(Measurement(1, batch, 1, 1.0, 0.0))
    assert measurements.fit().num_measured == MOST_CONFIGURATIONS
