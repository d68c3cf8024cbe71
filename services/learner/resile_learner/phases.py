"""The phase that the main thread of a worker is in, and how long each phase has taken."""

import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

Phase = Literal["waiting", "data", "compute", "validation", "callback"]
"""What the main thread does: *waiting* for others, or code of this package; reading a shard's *data*; its *compute*; a
shard of *validation*; *callback*, the user's code from an exchange to the next shard, with the optimizer's step."""


class CurrentPhase(NamedTuple):
    """A phase, and when it began on the monotonic clock."""

    phase: Phase
    since: float


class Phases:
    """Written by the main thread at each change of phase, one attribute at a time; any thread may read it."""

    def __init__(self) -> None:
        self.current = CurrentPhase("waiting", time.monotonic())
        self.longest: dict[Phase, float] = {}
        """The longest time that each phase has taken so far, in seconds."""
        self._seconds: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> None:
        """Begin ``phase``, and end the current one."""
        moment = time.monotonic()
        left, since = self.current
        spent = moment - since
        self._seconds[left] = self._seconds.get(left, 0.0) + spent
        if spent > self.longest.get(left, 0.0):
            self.longest[left] = spent
        self.current = CurrentPhase(phase, moment)

    def take_seconds(self, phases: Iterable[Phase]) -> list[float]:
        """Return the seconds that each of ``phases`` took since the last call."""
        taken = [self._seconds.get(phase, 0.0) for phase in phases]
        self._seconds.clear()
        return taken
