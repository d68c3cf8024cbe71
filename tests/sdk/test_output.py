"""The output of a run is that of the lowest rank, each line once, also when that becomes another worker."""

import pytest

from resile.local.output import LowestRankOutput

Step = tuple[int, str] | list[int]


def shown(*steps: Step) -> list[str]:
    """What is shown where workers print lines, and others train from then on, of which the first is the lowest rank."""
    output, found = LowestRankOutput(), []
    leader = None
    for step in steps:
        if isinstance(step, list):
            leader = step[0]
            found += output.follow(step)
        elif not output.printed(*step) and step[0] == leader:
            found.append(step[1])
    return found


def test_the_lines_of_the_lowest_rank_are_shown() -> None:
    assert shown([0, 1], (0, "a"), (1, "a"), (1, "b"), (0, "b")) == ["a", "b"]


def test_lines_that_the_lost_worker_had_not_printed_are_shown() -> None:
    assert shown([0, 1], (0, "a"), (1, "a"), (1, "b"), (1, "c"), [1], (1, "d")) == ["a", "b", "c", "d"]


def test_lines_that_the_lost_worker_had_printed_alone_are_shown_once() -> None:
    lines = shown([0, 1], (0, "a"), (1, "a"), (0, "b"), (0, "c"), [1], (1, "b"), (1, "c"), (1, "d"))
    assert lines == ["a", "b", "c", "d"]


JOINED: list[Step] = [[0], (1, "begins"), (0, "begins"), (0, "a"), [0, 1]]
"""A worker joins after the line "a"."""


def test_lines_that_a_joiner_has_printed_and_the_lost_worker_had_not_are_shown() -> None:
    assert shown(*JOINED, (1, "b"), (1, "c"), [1], (1, "d")) == ["begins", "a", "b", "c", "d"]


def test_lines_that_the_lost_worker_had_printed_since_another_joined_are_shown_once() -> None:
    assert shown(*JOINED, (0, "b"), (0, "c"), [1], (1, "b"), (1, "c"), (1, "d")) == ["begins", "a", "b", "c", "d"]
    assert shown(*JOINED, [1], (1, "b")) == ["begins", "a", "b"]


def test_a_worker_that_prints_something_else_is_shown_from_there_on() -> None:
    assert shown([0, 1], (0, "a"), (0, "b"), (1, "a"), [1], (1, "x"), (1, "b")) == ["a", "b", "x", "b"]
    assert shown([0, 1], (0, "0.29 s"), (1, "0.31 s"), [1], (1, "0.35 s")) == ["0.29 s", "0.35 s"]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_equal_lines_are_counted_from_the_last_one(ahead: int) -> None:
    """Which of them a worker has printed is not known: those that are ahead may be missing, and none comes twice."""
    steps: list[Step] = [[0, 1], *[(0, "."), (1, ".")] * 3, *[(1, ".")] * ahead, [1], (1, "end")]
    assert shown(*steps) == [".", ".", ".", "end"]


def test_a_worker_that_starts_over_is_shown_again() -> None:
    assert shown([0, 1], (0, "a"), (1, "a"), [2], (2, "a"), (2, "b")) == ["a", "a", "b"]
