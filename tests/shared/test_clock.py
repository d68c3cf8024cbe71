"""Deadlines follow time as it passes, whatever happens to the wall clock."""

from types import SimpleNamespace

import pytest

from resile_shared import clock


class Clocks:
    """The clocks of a machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.steady = 1_000_000.0, 50.0
        monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: self.wall, monotonic=lambda: self.steady))

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_moves_no_deadline_and_is_made_up_for_in_time(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    steady = clock.SteadyClock()
    clocks.passes(10.0)
    assert steady.now() == clocks.wall == 1_000_010.0
    clocks.wall += step
    before = steady.now()
    assert before == 1_000_010.0
    clocks.passes(10.0)
    assert 9.0 <= steady.now() - before <= 11.0
    for _ in range(4000):
        clocks.passes(10.0)
        now = steady.now()
        assert before < now
        before = now
    assert steady.now() == pytest.approx(clocks.wall)
