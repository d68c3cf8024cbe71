"""A policy in a replay: what it sees, how its workers are packed, and the fitted throughput."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.published.overlapped import fit
from bench.published.packing import pack
from bench.published.policy_scheduler import PolicyScheduler
from bench.published.replay import Cluster, Events, Measurement, Ticks, replay
from resile_scheduler.policies.demand import BatchRange, Demand, Target
from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.goodput import goodput

from .test_replay import arrival


class Doubling:
    """Gives each job all it may have, and keeps the demands that it saw."""

    def __init__(self) -> None:
        self.seen: list[Demand] = []

    def __call__(self, demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        self.seen += demands
        return {demand.job: Target(min(demand.most, num_slots), "") for demand in demands}


def test_a_job_may_have_twice_the_workers_that_it_ever_had_and_shows_only_what_it_has_measured() -> None:
    policy = Doubling()
    replay([arrival("a")], PolicyScheduler(policy, change_seconds=30, fixed={}), Cluster(1, 2), Ticks(60, 30))
    first, second = policy.seen[:2]
    assert (first.most, first.throughput, first.noise_scale, first.attained) == (1, None, None, 0.0)
    assert (second.most, second.assigned_workers, second.attained) == (2, 1, 60.0)
    assert second.noise_scale == float("inf"), "the gradient is all noise"
    assert second.throughput is not None
    assert second.throughput.num_measured == 1
    assert second.batch is not None
    assert second.iterations_total is None


def test_an_application_with_a_fixed_batch_has_one_worker() -> None:
    policy = Doubling()
    scheduler = PolicyScheduler(policy, change_seconds=0, fixed={"toy": 32})
    (done,) = replay([arrival("a")], scheduler, Cluster(1, 2), Events(60, 0))
    assert {(demand.most, demand.batch, demand.batch_size) for demand in policy.seen} == {(1, None, 32)}
    assert done.num_changes == 0


def test_under_goodput_jobs_share_and_a_replay_repeats_itself() -> None:
    jobs = [arrival(f"j{number}", time=20.0 * number) for number in range(6)]

    def outcomes() -> object:
        return replay(jobs, PolicyScheduler(goodput, change_seconds=5, fixed={}), Cluster(2, 1), Events(30, 5))

    assert outcomes() == outcomes()


def test_a_job_whose_number_of_workers_stays_keeps_its_nodes() -> None:
    wanted = {"a": ((1,), 1), "b": ((), 4), "c": ((2, 2), 2)}
    assert pack(wanted, Cluster(3, 4)) == {"a": (1,), "b": (0, 0, 0, 0), "c": (2, 2)}


def test_small_jobs_make_room_for_one_that_would_be_spread() -> None:
    wanted = {"a": ((0,), 1), "b": ((1, 1), 2), "c": ((), 4)}
    assert pack(wanted, Cluster(2, 4)) == {"b": (1, 1), "c": (0, 0, 0, 0), "a": (1,)}


def test_a_job_that_is_spread_comes_together_when_there_is_room() -> None:
    assert pack({"a": ((0, 1), 2)}, Cluster(2, 2)) == {"a": (0, 0)}


def test_a_job_that_must_be_spread_is() -> None:
    wanted = {"a": ((0, 0, 0), 3), "b": ((1, 1, 1), 3), "c": ((), 2)}
    placed = pack(wanted, Cluster(2, 4))
    assert sorted(node for nodes in placed.values() for node in nodes) == [0] * 4 + [1] * 4
    assert {job: len(nodes) for job, nodes in placed.items()} == {"a": 3, "b": 3, "c": 2}


def test_the_fit_recovers_a_model_from_its_measurements() -> None:
    measurements = []
    sizes = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 6), (2, 8), (3, 12)]
    for (num_nodes, num_workers), local in itertools.product(sizes, (8, 12, 16)):
        compute = 0.1 + 0.02 * local
        more = max(num_workers - 2, 0)
        exchange = 0.0 if num_workers == 1 else 0.2 + 0.05 * more if num_nodes > 1 else 0.1 + 0.02 * more
        step = float(np.hypot(compute, exchange))
        measurements.append(Measurement(num_nodes, num_workers, local, step, step - compute))
    found = fit(measurements, initial=8, largest_local=16)
    assert found.overlap == 2.0
    assert found.compute.intercept == pytest.approx(0.1)
    assert found.exchange_across.slope == pytest.approx(0.05)
    assert found.seconds(16, 16 * 12, across=True) == pytest.approx(np.hypot(0.1 + 0.02 * 12, 0.2 + 0.05 * 14))
    assert found.seconds(1, 48) == pytest.approx(3 * (0.1 + 0.02 * 16)), "three steps of 16"


def test_what_was_not_measured_is_taken_to_be_good_enough_to_try() -> None:
    alone = fit([Measurement(1, 1, 8, 1.0, 0.0)], initial=8, largest_local=16)
    assert alone.seconds(1, 8) == pytest.approx(1.0)
    assert alone.seconds(2, 32) == pytest.approx(1.5), "half of the time does not grow with the batch"
    together = fit([Measurement(1, 2, 8, 1.5, 0.5)], initial=8, largest_local=16)
    assert together.exchange_across.intercept == pytest.approx(1.1 * together.exchange.intercept)


def test_what_was_measured_is_predicted_as_it_was() -> None:
    sizes = [(1, 8, 0.0), (2, 8, 0.1), (2, 16, 0.5), (3, 8, 0.9), (4, 16, 0.3)]
    measurements = [Measurement(1, workers, local, local / 8 + sync, sync) for workers, local, sync in sizes]
    found = fit(measurements, initial=8, largest_local=16)
    for _, workers, local, step, _ in measurements:
        assert found.seconds(workers, workers * local) == pytest.approx(step)


def test_the_time_of_one_configuration_is_among_those_of_many() -> None:
    sizes = [(1, 8, 0.0), (2, 8, 0.1), (2, 16, 0.5), (8, 8, 0.9), (8, 16, 0.3)]
    measurements = [Measurement(-(-n // 4), n, local, local / 8 + sync, sync) for n, local, sync in sizes]
    found = fit(measurements, initial=8, largest_local=16)
    for workers, batch in itertools.product((1, 2, 4, 8), (8, 16, 48, 512)):
        for across in (False, True):
            several = found.seconds([workers, 2], [batch, 16], across=[across, False])
            assert found.seconds_of(workers, batch, across=across) == pytest.approx(several[0])
            assert found.rate(workers, batch, across=across) == pytest.approx(batch / several[0])
            fixed = found.with_workers(workers, across=across)
            assert (fixed.seconds(batch), fixed.rate(batch)) == pytest.approx((several[0], batch / several[0]))


@pytest.mark.parametrize("size", [2, 4])
def test_elastic_batch_knows_what_a_worker_computes_at_once_and_how_far_measurements_are_off_the_lines(
    size: int,
) -> None:
    """It expects as much of more workers and a larger batch as the model does."""
    sizes = [(1, 8, 0.1), (1, 16, 0.18), (2, 16, 0.25), (4, 16, 1.1)]
    found = fit([Measurement(1, n, local, step, 0.05 * n) for n, local, step in sizes], initial=8, largest_local=16)
    job = Demand("a", 1, 1, 1, 4, sizes=(1, size), batch=BatchRange(8, 512), throughput=found)
    target = elastic_batch([replace(job, least=size)], 4)["a"]
    every = np.arange(8, 513)
    rates = found.rate(size, every)
    assert target.batch_size is not None
    assert rates[target.batch_size - 8] >= 0.98 * rates.max()
    assert f"{rates[target.batch_size - 8] * found.seconds_of(1, 8) / 8:.1f} times as fast" in target.reason
