"""The solver finds the largest sum for any curves: compared with all choices, and with a plain dynamic program."""

import itertools
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from resile_scheduler.policies.solver import Curve, solve


def curve(values: dict[int, float]) -> Curve:
    sizes = sorted(values)
    return Curve(np.array(sizes), np.array([float(values[size]) for size in sizes]))


def worth(curves: list[Curve], sizes: list[int]) -> float:
    """Return the sum of the values; a size that is not allowed fails."""
    return sum(
        dict(zip(c.sizes.tolist(), c.values.tolist(), strict=True))[n] for c, n in zip(curves, sizes, strict=True)
    )


def best_of_all(curves: list[Curve], num_slots: int) -> float:
    """Return the largest sum there is, by trying everything."""
    choices = itertools.product(*(zip(c.sizes.tolist(), c.values.tolist(), strict=True) for c in curves))
    return max(sum(v for _, v in choice) for choice in choices if sum(n for n, _ in choice) <= num_slots)


def best_by_dynamic_program(curves: list[Curve], num_slots: int) -> float:
    """Return the largest sum by the textbook's program over jobs, slots and sizes."""
    best = np.zeros(num_slots + 1)
    for one in curves:
        after = np.full(num_slots + 1, -np.inf)
        for size, value in zip(one.sizes.tolist(), one.values.tolist(), strict=True):
            if size <= num_slots:
                np.maximum(after[size:], best[: num_slots + 1 - size] + value, out=after[size:])
        best = after
    return float(best[num_slots])


@st.composite
def any_curve(draw: st.DrawFn) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=5)))
    return curve({size: draw(st.integers(-3, 9) | st.floats(-9.0, 9.0, width=32)) for size in sizes})


@settings(max_examples=400)
@given(curves=st.lists(any_curve(), max_size=5), spare=st.integers(0, 40))
def test_the_sum_is_the_largest_of_all(curves: list[Curve], spare: int) -> None:
    num_slots = sum(int(one.sizes[0]) for one in curves) + spare
    sizes = solve(curves, num_slots)
    assert sum(sizes) <= num_slots
    assert worth(curves, sizes) == pytest.approx(best_of_all(curves, num_slots), rel=1e-9, abs=1e-9)


def test_many_small_changes_make_up_for_few_large_ones() -> None:
    """In the order of their losses, the changes exceed by far what is left, before the large ones make room."""
    small, large, marginal = curve({0: 0.0, 3: 2.99}), curve({0: 0.0, 10: 10.02}), curve({0: 0.0, 12: 12.0})
    curves = [small] * 5 + [large] * 2 + [marginal]
    sizes = solve(curves, 21)
    assert sorted(sizes) == [0, 0, 0, 0, 3, 3, 3, 12]
    assert worth(curves, sizes) == pytest.approx(best_of_all(curves, 21))


def concave(rng: np.random.Generator) -> Curve:
    sizes = np.arange(1, 33)
    serial = rng.uniform(0.0, 0.3)
    return Curve(sizes, sizes / (1 - serial + serial * sizes))


def steps_of_shards(rng: np.random.Generator) -> Curve:
    shards = int(rng.choice([8, 16, 24, 32]))
    sizes = np.arange(1, shards + 1)
    return Curve(sizes, shards / np.ceil(shards / sizes))


def slower_across_hosts(rng: np.random.Generator) -> Curve:
    sizes = np.arange(1, 33)
    seconds = 1 / sizes + rng.uniform(0.0, 0.05) * (sizes > 1) + rng.uniform(0.0, 0.1) * (sizes > 8)
    return Curve(sizes, seconds[0] / seconds)


def all_or_nothing(rng: np.random.Generator) -> Curve:
    size = int(rng.integers(5, 32))
    return Curve(np.array([0, size]), np.array([0.0, size + rng.uniform(-1.0, 1.0)]))


def subset_sum(rng: np.random.Generator) -> Curve:
    size = int(rng.integers(9, 32))
    return Curve(np.array([0, size]), np.array([0.0, size]))


def convex(rng: np.random.Generator) -> Curve:
    sizes = np.arange(0, 33)
    return Curve(sizes, (sizes / 32.0) ** 2 * rng.uniform(0.9, 1.1))


def noise(rng: np.random.Generator) -> Curve:
    return Curve(np.arange(0, 33), rng.uniform(0.0, 1.0, 33))


def gangs_of_four(rng: np.random.Generator) -> Curve:
    sizes = np.arange(4, 33, 4)
    return Curve(sizes, sizes ** rng.uniform(0.6, 1.0))


Kind = Callable[[np.random.Generator], Curve]
KINDS: tuple[Kind, ...] = (
    concave,
    steps_of_shards,
    slower_across_hosts,
    all_or_nothing,
    subset_sum,
    convex,
    noise,
    gangs_of_four,
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kinds", [*((kind,) for kind in KINDS), KINDS], ids=lambda kinds: kinds[0].__name__ * (len(kinds) == 1) or "mixed"
)
def test_many_jobs_of_every_kind(kinds: tuple[Kind, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    curves = [kinds[number % len(kinds)](rng) for number in range(80)]
    for num_slots in (sum(int(one.sizes[0]) for one in curves) + spare for spare in (0, 1, 77, 500, 1501, 5000)):
        sizes = solve(curves, num_slots)
        assert sum(sizes) <= num_slots
        assert worth(curves, sizes) == pytest.approx(best_by_dynamic_program(curves, num_slots), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_curves_give_the_same_sizes(kind: Kind) -> None:
    first, again = ([kind(np.random.default_rng(n)) for n in range(20)] for _ in range(2))
    assert solve(first, 200) == solve(again, 200)


@given(num_jobs=st.integers(1, 9), num_slots=st.integers(9, 60), per_slot=st.floats(0.01, 100.0))
def test_equal_linear_curves_share_equally_and_the_earlier_get_what_remains(
    num_jobs: int, num_slots: int, per_slot: float
) -> None:
    line = curve({size: size * per_slot for size in range(1, 101)})
    assert solve([line] * num_jobs, num_slots) == [
        num_slots // num_jobs + (number < num_slots % num_jobs) for number in range(num_jobs)
    ]


def test_a_slot_that_is_worth_nothing_stays_idle() -> None:
    flat = curve({1: 1.0, 2: 3.0, 3: 3.0, 4: 2.0})
    assert solve([flat, flat], 100) == [2, 2]


def test_a_job_that_may_have_none_makes_room() -> None:
    assert solve([curve({0: 0.0, 3: 3.0}), curve({2: 1.0, 4: 5.0})], 4) == [0, 4]


def test_smallest_sizes_that_do_not_fit_are_refused() -> None:
    assert solve([], 0) == []
    with pytest.raises(ValueError, match="use 5 slots, more than 4"):
        solve([curve({2: 1.0}), curve({3: 1.0, 4: 9.0})], 4)
