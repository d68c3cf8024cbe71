"""What counts as growth, and what a sample of a pool contains."""

import pytest

from .growth import growth


def test_what_fills_up_and_stays_is_no_growth() -> None:
    assert not growth("files", [0, 50, 100, 100, 101, 99, 100, 103], slack=0).is_growing


def test_what_rises_all_the_time_is_growth() -> None:
    assert growth("files", list(range(100, 200)), slack=10).is_growing


def test_a_little_more_is_allowed() -> None:
    assert not growth("descriptors", [10, 10, 10, 10, 10, 10, 13, 13], slack=3).is_growing
    assert growth("descriptors", [10, 10, 10, 10, 10, 10, 14, 14], slack=3).is_growing


def test_one_peak_is_no_growth() -> None:
    assert not growth("memory", [20.0] * 18 + [90.0] + [20.0], slack=1).is_growing


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="3 samples are too few"):
        growth("memory", [1, 2, 3], slack=0)
