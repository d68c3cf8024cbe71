"""An internal error of a core tells the events that led to it, and no more than a bounded number of them."""

import pytest

from resile_shared.recent_events import MAX_EVENTS, InternalError, RecentEvents


def test_an_internal_error_tells_the_events_that_led_to_it() -> None:
    recent = RecentEvents("registry")
    with recent.handling("hello"):
        pass
    story = r"in the registry: KeyError: 'host-1'(?s:.*)'hello'\n  'goodbye'"
    with pytest.raises(InternalError, match=story), recent.handling("goodbye"):
        raise KeyError("host-1")


def test_only_the_last_events_are_kept_and_long_ones_are_cut() -> None:
    recent = RecentEvents("registry")
    for number in range(3 * MAX_EVENTS):
        with recent.handling(f"{number} {'x' * 10_000}"):
            pass
    lines = str(recent).splitlines()
    assert len(lines) == MAX_EVENTS
    assert lines[0].startswith(f"  '{2 * MAX_EVENTS} ")
    assert max(map(len, lines)) < 500
