"""The time that cores are given: that of the wall clock, without the steps by which it can be set."""

import time

MAX_SLEW = 0.1


class SteadyClock:
    """Follows the wall clock, but at most a tenth faster or slower than time really passes.

    So when someone sets the clock an hour forward, no deadline passes because of that, and what is recorded returns
    to the wall clock gradually.
    """

    def __init__(self) -> None:
        self._now = time.time()
        self._last = time.monotonic()

    def now(self) -> float:
        """Return the time, in seconds since the epoch; it only rises."""
        monotonic = time.monotonic()
        elapsed, self._last = monotonic - self._last, monotonic
        limit = MAX_SLEW * elapsed
        behind = time.time() - (self._now + elapsed)
        self._now += elapsed + min(max(behind, -limit), limit)
        return self._now
