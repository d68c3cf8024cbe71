"""A member that is slower than the others is reported once, with the reason; no other member is."""

from collections.abc import Callable, Sequence

import pytest

from resile_learner.training.stragglers import MAX_WARNINGS, Pace, Stragglers

Measure = Callable[[], Pace]


def pace(
    *,
    shards: int = 2,
    data: float = 0.002,
    compute: float = 0.02,
    processor: float | None = None,
    callback: float = 0.0,
    last: int = 0,
    awaited: float = 0.0,
) -> Pace:
    busy = data + compute if processor is None else processor
    return Pace(shards, shards * data, shards * compute, shards * busy, callback, last, awaited)


class Run:
    """A run whose iterations take a fixed time; what is said of it."""

    def __init__(self, *workers: int) -> None:
        self.stragglers = Stragglers()
        self.now = 50.0
        self.members_are(*workers)

    def members_are(self, *workers: int) -> None:
        self.stragglers.restart(workers, now=self.now)

    def train(self, *paces: Pace | None, seconds: float = 6.0, iteration: float = 0.1) -> list[str]:
        words = []
        for _ in range(round(seconds / iteration)):
            self.now += iteration
            words += self.stragglers.on_iteration(paces, now=self.now)
        return words


USUAL = pace()


@pytest.mark.parametrize(
    ("slow", "why"),
    [
        (pace(data=0.03, processor=0.022), "it waits for its data"),
        (pace(data=0.03), "it waits for its data"),
        (pace(compute=0.06, processor=0.022), "other processes use its processor"),
        (pace(data=0.006, compute=0.06, processor=0.022), "other processes use its processor"),
        (pace(compute=0.06), "its device is slower"),
    ],
)
def test_a_straggler_is_reported_with_its_reason(slow: Pace, why: str) -> None:
    (words,) = Run(4, 5, 9).train(USUAL, USUAL, slow)
    assert words.startswith("worker 9 takes ")
    assert why in words


def test_with_two_members_the_other_is_the_measure() -> None:
    (words,) = Run(0, 1).train(pace(compute=0.06), USUAL)
    assert words == "worker 0 takes 2.8 times as long as the others for a shard: its device is slower"


def test_shares_of_unequal_size_are_compared_by_the_shard() -> None:
    assert Run(0, 1, 2).train(pace(shards=3), pace(shards=3), pace(shards=2)) == []


def test_nothing_is_said_before_there_are_fifty_iterations_and_five_seconds() -> None:
    slow = pace(compute=0.3)
    assert Run(0, 1).train(slow, USUAL, seconds=4.8) == []
    assert Run(0, 1).train(slow, USUAL, seconds=49, iteration=1.0) == []
    assert Run(0, 1).train(slow, USUAL, seconds=50, iteration=1.0) != []


def test_a_straggler_is_reported_once_and_when_it_is_over() -> None:
    run = Run(0, 1, 2)
    slow = pace(compute=0.06, processor=0.02)
    assert len(run.train(USUAL, slow, USUAL, seconds=60)) == 1
    assert run.train(USUAL, USUAL, USUAL, seconds=60) == ["worker 1 is about as fast as the others again"]


def test_another_reason_is_reported() -> None:
    run = Run(0, 1, 2)
    run.train(USUAL, pace(compute=0.06), USUAL)
    (words,) = run.train(USUAL, pace(data=0.06), USUAL, seconds=10)
    assert "waits for its data" in words


def test_a_single_hiccup_is_no_straggler() -> None:
    run = Run(0, 1, 2)
    run.train(USUAL, USUAL, USUAL)
    words = run.train(USUAL, pace(compute=3.0), USUAL, seconds=0.1)
    assert words + run.train(USUAL, USUAL, USUAL, seconds=20) == []


def test_bursts_of_a_slow_processor_are_reported() -> None:
    run = Run(0, 1, 2)
    words: list[str] = []
    for _ in range(10):
        words += run.train(USUAL, pace(compute=0.5, processor=0.02), USUAL, seconds=0.1)
        words += run.train(USUAL, USUAL, USUAL, seconds=0.9)
    (only,) = words
    assert "other processes use its processor" in only


def test_a_surplus_that_delays_no_iteration_by_much_is_not_worth_a_word() -> None:
    small = pace(data=0.0001, compute=0.001)
    assert Run(0, 1, 2).train(small, small, pace(data=0.0001, compute=0.003)) == []


def test_who_sends_late_has_a_slow_link() -> None:
    late = pace(last=2, awaited=0.06)
    (words,) = Run(0, 1, 2).train(late, late, USUAL)
    assert words == "iterations take 2.5 times as long because of worker 2: the others wait for its link"


def test_between_two_the_link_is_named_once() -> None:
    (words,) = Run(3, 7).train(pace(last=1, awaited=0.06), pace(last=0, awaited=0.06))
    assert words == "iterations take 2.5 times as long because of the link between workers 3 and 7"


def test_who_begins_late_has_no_slow_link() -> None:
    late = pace(last=0, awaited=0.06)
    assert Run(0, 1, 2).train(pace(callback=0.06), late, late) == []


def test_one_link_alone_accuses_nobody() -> None:
    paces: Sequence[Pace] = (pace(last=2, awaited=0.06), USUAL, pace(last=0, awaited=0.06))
    assert Run(0, 1, 2).train(*paces) == []


def test_a_member_alone_is_compared_with_nobody() -> None:
    assert Run(0).train(USUAL, seconds=20) == []


def test_a_change_restarts_the_measurement_and_a_known_straggler_is_not_reported_again() -> None:
    run = Run(0, 1, 2)
    slow = pace(compute=0.06)
    assert len(run.train(USUAL, slow, USUAL)) == 1
    run.members_are(0, 1, 2, 3)
    assert run.train(USUAL, slow, USUAL, USUAL, seconds=20) == []
    run.members_are(0, 2, 3)
    assert run.train(USUAL, USUAL, USUAL, seconds=20) == []


def test_the_number_of_warnings_is_limited() -> None:
    run = Run(0, 1)
    words: list[str] = []
    for _ in range(MAX_WARNINGS):
        words += run.train(USUAL, pace(compute=0.06), seconds=10)
        words += run.train(USUAL, USUAL, seconds=10)
    assert len(words) == MAX_WARNINGS
