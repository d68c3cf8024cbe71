"""The policy that shares slots by goodput: best batches, fairness, and what a change must earn."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from resile_scheduler.policies.demand import BatchRange, Demand
from resile_scheduler.policies.goodput import allowed_sizes, best_batches, goodput
from resile_scheduler.policies.throughput import Line, Throughput

MEASURED = Throughput(
    compute=Line(0.1, 0.01), exchange=Line(0.1, 0.01), exchange_across=Line(0.4, 0.02), num_measured=4
)


def demand(job: str = "a", number: int = 1, **fields: object) -> Demand:
    defaults: dict[str, object] = {
        "priority": 5000,
        "least": 1,
        "most": 16,
        "batch": BatchRange(16, 512),
        "throughput": MEASURED,
        "most_measured": 16,
        "noise_scale": 200.0,
        "slots_per_host": 4,
    }
    return Demand(job=job, number=number, **{**defaults, **fields})  # type: ignore[arg-type]


def test_a_job_alone_gets_the_size_with_the_most_goodput() -> None:
    alone = demand()
    sizes, batches, rates = best_batches(alone, allowed_sizes(alone, 16))
    target = goodput([alone], 16)["a"]
    best = int(rates.argmax())
    assert (target.workers, target.batch_size) == (sizes[best], batches[best])
    assert "times that of an equal share" in target.reason


def test_the_best_batch_is_that_of_the_formula() -> None:
    _, batches, rates = best_batches(demand(), (4,))
    candidates = np.rint(np.geomspace(16, 512, 50))
    expected = candidates / MEASURED.seconds(4, candidates) * (200 + 16) / (200 + candidates)
    assert batches[0] == candidates[expected.argmax()]
    assert rates[0] == pytest.approx(expected.max())


def test_batches_that_fill_all_passes_are_considered() -> None:
    """Computing takes nearly the same time whatever the samples of a pass, so that none should be left unused."""
    limited = Throughput(compute=Line(0.1, 1e-4), exchange=Line(0.1), micro_batch_size=7, num_measured=4)
    for noise in (50.0, 200.0, 2000.0):
        _, (best,), _ = best_batches(demand(noise_scale=noise, throughput=limited), (4,))
        every = np.arange(16, 513)
        goodputs = every / limited.seconds(4, every) * (noise + 16) / (noise + every)
        assert best == every[goodputs.argmax()]
        assert best % 28 == 0


@pytest.mark.parametrize("size", range(1, 9))
def test_no_batch_is_larger_than_the_range(size: int) -> None:
    most = 2**53 - 1
    widest = demand(batch=BatchRange(1, most), noise_scale=float("inf"))
    _, (best,), _ = best_batches(widest, (size,))
    assert best <= most


def test_more_noise_makes_larger_batches_worth_more() -> None:
    least, middle, most = (best_batches(demand(noise_scale=noise), (4,))[1][0] for noise in (0.0, 200.0, float("inf")))
    assert least < middle < most
    assert most == 512


@pytest.mark.parametrize(("times", "stays"), [(1.0, True), (1.2, True), (0.8, True), (3.0, False), (0.3, False)])
def test_with_the_same_workers_a_batch_stays_that_has_nearly_the_best_goodput(times: float, stays: bool) -> None:
    _, batches, _ = best_batches(demand(sizes=(4,)), (4,))
    present = round(times * batches[0])
    job = demand(sizes=(4,), assigned_workers=4, batch_size=present)
    assert goodput([job], 16)["a"].batch_size == (present if stays else batches[0])
    elsewhere = demand(sizes=(4,), assigned_workers=2, batch_size=present)
    assert goodput([elsewhere], 16)["a"].batch_size == batches[0]


def test_workers_on_several_hosts_get_the_batch_that_is_best_there_though_one_host_could_hold_them() -> None:
    scattered = demand(sizes=(2,), assigned_workers=2, batch_size=16, is_scattered=True)
    candidates = np.rint(np.geomspace(16, 512, 50))
    goodputs = candidates / MEASURED.seconds(2, candidates, across=True) * (200 + 16) / (200 + candidates)
    best = candidates[goodputs.argmax()]
    assert goodput([scattered], 16)["a"].batch_size == best
    _, (packed,), _ = best_batches(demand(sizes=(2,)), (2,))
    assert best > packed


def test_workers_on_several_hosts_keep_a_batch_that_is_nearly_the_best_there() -> None:
    (chosen,) = (goodput([demand(sizes=(2,), assigned_workers=2, is_scattered=True)], 16)["a"].batch_size,)
    assert chosen is not None
    present = round(1.2 * chosen)
    job = demand(sizes=(2,), assigned_workers=2, batch_size=present, is_scattered=True)
    assert goodput([job], 16)["a"].batch_size == present


def test_a_batch_stays_only_within_the_limits_of_the_job() -> None:
    _, (best,), _ = best_batches(demand(sizes=(4,)), (4,))
    limits = BatchRange(16, 512, least_per_slot=int(best) // 4)
    below = demand(sizes=(4,), assigned_workers=4, batch_size=int(best) - 4, batch=limits)
    assert goodput([below], 16)["a"].batch_size >= 4 * limits.least_per_slot


def test_a_job_without_measurements_keeps_the_smallest_batch_that_its_workers_can_share() -> None:
    unmeasured = demand(throughput=None, noise_scale=None, batch=BatchRange(16, 512, least_per_slot=8))
    sizes, batches, rates = best_batches(unmeasured, (1, 2, 4, 8))
    assert list(batches) == [16, 16, 32, 64]
    assert list(rates) == list(sizes)


def test_sizes_that_cannot_share_the_largest_batch_are_not_considered() -> None:
    assert best_batches(demand(batch=BatchRange(16, 32, least_per_slot=8)), (1, 4, 8))[0] == (1, 4)


def test_sizes_fill_hosts() -> None:
    assert allowed_sizes(demand(most=16), 64) == (1, 2, 4, 8, 12, 16)
    assert allowed_sizes(demand(most=16, least=3), 64) == (3, 4, 8, 12, 16)
    assert allowed_sizes(demand(most=16), 5) == (1, 2, 4)
    assert allowed_sizes(demand(sizes=(3, 6, 24)), 64) == (3, 6)
    assert allowed_sizes(demand(least=4, most=2), 64) == ()


def test_equal_jobs_share_equally_and_a_fixed_batch_stays() -> None:
    targets = goodput([demand("a", 1, batch=None, batch_size=64), demand("b", 2, batch=None, batch_size=64)], 8)
    assert {job: (target.workers, target.batch_size) for job, target in targets.items()} == {
        "a": (4, None),
        "b": (4, None),
    }


def test_a_job_that_has_attained_little_goes_before_one_that_has_attained_much() -> None:
    old, new = demand("old", 1, attained=1e6), demand("new", 2)
    targets = goodput([old, new], 1)
    assert (targets["old"].workers, targets["new"].workers) == (0, 1)
    assert targets["old"].reason == "waiting for 1 slots: other jobs make more progress with them"


def test_a_change_that_earns_less_than_it_costs_is_not_made() -> None:
    sizes, _, rates = best_batches(demand(), (8, 12))
    assert sizes == (8, 12)
    assert 1.0 < rates[1] / rates[0] < 1.2

    def workers(change_seconds: float) -> int:
        return goodput([demand(sizes=(8, 12), assigned_workers=8, change_seconds=change_seconds)], 16)["a"].workers

    assert workers(0.0) == 12
    assert workers(60.0) == 8


COMPUTES = Throughput(compute=Line(0.0, 0.01), num_measured=1)


def fixed(job: str, number: int, measured: int, **fields: object) -> Demand:
    """A job that scales perfectly, as far as it was measured."""
    throughput = COMPUTES if measured else None
    defaults: dict[str, object] = {"throughput": throughput, "most_measured": measured, "most": 8, "batch_size": 64}
    return demand(job, number, **{"batch": None, "slots_per_host": 8, **defaults, **fields})


def workers(*demands: Demand, num_slots: int) -> list[int]:
    return [target.workers for target in goodput(demands, num_slots).values()]


@pytest.mark.parametrize(("measured", "expected"), [(0, 1), (1, 2), (2, 4), (8, 5)])
def test_a_job_gets_twice_the_workers_that_it_has_measured_while_others_can_use_the_slots(
    measured: int, expected: int
) -> None:
    sizes = tuple(range(1, 9))
    old = [fixed(job, number, 8, sizes=sizes, assigned_workers=8) for number, job in enumerate("ab")]
    assert workers(*old, fixed("new", 2, measured, sizes=sizes), num_slots=16)[2] == expected


def test_slots_that_no_other_job_can_use_go_beyond_what_was_measured() -> None:
    assert workers(fixed("new", 1, 0), num_slots=8) == [8]
    assert workers(fixed("a", 1, 0), fixed("b", 2, 0), num_slots=8) == [4, 4]
    assert workers(fixed("old", 1, 8, most=4, assigned_workers=4), fixed("new", 2, 0), num_slots=12) == [4, 8]


def test_a_job_keeps_the_workers_that_it_has_not_measured_yet() -> None:
    """Otherwise each arrival would undo what a decision has just begun."""
    sizes = tuple(range(1, 9))
    measured = fixed("a", 1, 8, sizes=sizes, assigned_workers=4)
    assert workers(measured, fixed("b", 2, 0, sizes=sizes, assigned_workers=4), num_slots=8) == [4, 4]


def test_of_allowed_sizes_the_next_one_is_always_within_reach() -> None:
    old = fixed("old", 1, 12, most=12, sizes=tuple(range(1, 13)), assigned_workers=8)
    assert workers(old, fixed("new", 2, 1, sizes=(1, 4, 7)), num_slots=13) == [9, 4]


def test_jobs_that_cannot_run_say_what_they_are_waiting_for() -> None:
    assert goodput([demand()], 0)["a"].reason == "waiting for a host: the pool has no slots"
    assert goodput([demand(least=8)], 4)["a"].reason == "waiting for hosts: no allowed number of workers from 8 to 4"
    assert goodput([], 4) == {}


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        least = draw(st.integers(1, 4))
        found.append(
            demand(
                f"job-{number}",
                number,
                least=least,
                most=draw(st.integers(least, 8)),
                priority=draw(st.integers(1, 10_000)),
                noise_scale=draw(st.floats(0, 1e6)),
                attained=draw(st.floats(0, 1e7)),
                assigned_workers=draw(st.integers(0, 8)),
                change_seconds=draw(st.sampled_from([0.0, 30.0, 400.0]) | st.floats(0, 400)),
                throughput=draw(st.sampled_from([None, MEASURED])),
                most_measured=draw(st.integers(0, 8)),
                iterations_total=draw(st.sampled_from([None, 1000])),
                iteration=draw(st.integers(900, 1000)),
                batch_size=draw(st.sampled_from([0, 64])),
            )
        )
    return found


@given(jobs=demands(), num_slots=st.integers(0, 12))
def test_no_more_slots_than_there_are_and_always_an_allowed_size(jobs: list[Demand], num_slots: int) -> None:
    targets = goodput(jobs, num_slots)
    assert sum(target.workers for target in targets.values()) <= num_slots
    for job in jobs:
        assert targets[job.job].workers in (0, *allowed_sizes(job, num_slots))
        assert targets[job.job].reason
    assert goodput(jobs, num_slots) == targets


@given(jobs=demands(), num_slots=st.integers(1, 8))
def test_a_slot_is_left_idle_only_if_no_waiting_job_could_start_on_it(jobs: list[Demand], num_slots: int) -> None:
    targets = goodput(jobs, num_slots)
    idle = num_slots - sum(target.workers for target in targets.values())
    waiting = [job for job in jobs if not targets[job.job].workers]
    assert all(job.least > idle for job in waiting)


def test_a_job_that_is_nearly_complete_does_not_wait_beside_idle_slots_though_its_start_costs_as_much() -> None:
    suspended = demand(iterations_total=100, iteration=99, batch_size=64, change_seconds=30.0)
    assert workers(suspended, num_slots=4) > [0]


def test_no_other_way_to_share_is_worth_more() -> None:
    jobs = [demand("a", 1), demand("b", 2, noise_scale=20.0), demand("c", 3, attained=1e5)]
    targets = goodput(jobs, 8)

    def loss(workers: tuple[int, ...]) -> float:
        total = 0.0
        for job, number in zip(jobs, workers, strict=True):
            sizes, _, rates = best_batches(job, allowed_sizes(job, 8))
            speed_up = rates[sizes.index(number)] / rates[sizes.index(2)] if number else 0.0  # 2 of 8: an equal share
            total += (speed_up + 1e-3) ** -0.25 / (job.attained + 3600) ** 0.5
        return total

    ways = [way for way in itertools.product((0, 1, 2, 4, 8), repeat=3) if sum(way) <= 8]
    assert loss(tuple(targets[job.job].workers for job in jobs)) == pytest.approx(min(map(loss, ways)))
