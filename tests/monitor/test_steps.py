"""Steps are bounded, keep what is newest, and are thinned alike however often that is done."""

import random

from hypothesis import example, given
from hypothesis import strategies as st

from resile_monitor.history.steps import FINEST_MS, NUM_INTERVALS, Steps, interval_ms, interval_of
from resile_shared.messages.slot_history import MAX_STEPS

CHANGES = st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 9)), max_size=300)
DAY_MS = 86_400_000


def steps_of(changes: list[tuple[int, int]]) -> Steps:
    steps, time = Steps(), 1_000_000
    for pause, value in changes:
        time += pause
        steps.add(time, value)
    return steps


def at(steps: Steps, time: int) -> int:
    held = [value for begin, value in zip(steps.times, steps.values, strict=True) if begin <= time]
    return held[-1] if held else 0


@given(CHANGES, st.integers(0, 10_000_000))
@example([(0, 1), (1, 0), (15535, 1)], 50_000)
@example([(0, 1), (200, 2), (1, 1), (200_000, 1)], 0)
def test_what_is_shown_does_not_depend_on_how_often_it_was_thinned(changes: list[tuple[int, int]], later: int) -> None:
    never, once, twice = (steps_of(changes) for _ in range(3))
    newest = never.newest + later
    twice.thin(twice.newest)
    for steps in (once, twice):
        steps.thin(newest - later // 2)
    for steps in (once, twice):
        assert steps.since(0, newest, finest=FINEST_MS) == never.since(0, newest, finest=FINEST_MS)


@given(CHANGES, st.integers(0, 30_000_000))
def test_what_held_at_the_end_of_each_interval_is_kept(changes: list[tuple[int, int]], age: int) -> None:
    steps = steps_of(changes)
    newest = steps.newest + age
    shown = steps.since(0, newest, finest=FINEST_MS)
    for time in shown.times:
        begin, interval = interval_of(time, newest)
        assert at(shown, begin + interval - 1) == at(steps, begin + interval - 1)
    assert shown.last == steps.last


@given(st.lists(CHANGES, min_size=2, max_size=4), st.integers(0, 100_000), st.integers(0, 10))
def test_jobs_that_are_shown_together_never_hold_more_than_there_is(
    jobs: list[list[tuple[int, int]]], age: int, power: int
) -> None:
    """A pool of 9 slots: one job has what the others leave. Each moment of the picture is one of reality."""
    moments = sorted({time for changes in jobs for time in steps_of(changes).times})
    held = [Steps() for _ in jobs]
    for time in moments:
        free = 9
        for steps, changes in zip(held, jobs, strict=True):
            value = min(free, at(steps_of(changes), time))
            free -= value
            steps.add(time, value)
    newest = max(moments, default=0) + age
    shown = [steps.since(0, newest, finest=FINEST_MS << power) for steps in held]
    for time in sorted({time for steps in shown for time in steps.times}):
        assert sum(at(steps, time) for steps in shown) <= 9


def test_a_day_of_changes_that_never_cease_is_kept_and_the_rest_is_bounded() -> None:
    steps, chance = Steps(), random.Random(0)
    for time in range(0, 3 * DAY_MS, 4096):
        steps.add(time, chance.randrange(1000))
    assert len(steps.times) <= MAX_STEPS
    assert steps.newest - steps.times[0] > DAY_MS
    for begin, end in zip(steps.times, steps.times[1:], strict=False):
        age = steps.newest - begin
        assert end - begin <= 4096 + 2 * max(FINEST_MS, age // (NUM_INTERVALS // 4))


def test_a_value_counts_from_the_newest_time_on_if_its_own_is_earlier() -> None:
    steps = Steps()
    for time, value in ((10, 1), (5, 2), (20, 2), (30, 0)):
        steps.add(time, value)
    assert (steps.times, steps.values) == ([10, 30], [2, 0])


def test_what_held_at_the_beginning_is_shown_from_there_on() -> None:
    steps = Steps([1000, 90_000_000], [5, 0])
    shown = steps.since(50_000_000, 100_000_000, finest=1024)
    assert shown.times[0] == 50_000_000
    assert shown.values == [5, 0]
    assert 90_000_000 - shown.times[1] < interval_ms(10_000_000, finest=1024)
    assert Steps().since(7, 10, finest=256) == Steps([7], [0])
    assert steps.area(100_000_000) == 5 * (90_000_000 - 1000)
