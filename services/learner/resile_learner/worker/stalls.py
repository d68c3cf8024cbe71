"""Whether a worker's own main thread makes progress, as its control thread sees it. Pure: times are arguments.

A phase has stalled when it lasts longer than twenty times ``detection_seconds`` and ten times the longest that it has
taken so far in this worker. A phase that has not occurred before may take ten minutes: a first iteration may compile.
So may a callback each time, as it may do something rare. Waiting for other workers never counts as a stall: they detect
their own. Time in which the whole process did not run for ``detection_seconds`` or longer does not count.
"""

from dataclasses import dataclass

from ..phases import CurrentPhase, Phase, Phases

FIRST_SECONDS = 600.0
MIN_DETECTIONS = 20
MIN_LONGEST = 10


@dataclass(frozen=True)
class Stall:
    """A phase that does not end."""

    phase: Phase
    seconds: float
    longest: float | None
    """The most seconds that the phase took before; None: it has not occurred before."""

    def __str__(self) -> str:
        before = "it was its first" if self.longest is None else f"it took at most {self.longest:.2g} s before"
        return f"stuck in {self.phase} for {self.seconds:.3g} s; {before}"


class StallDetector:
    """Checks the phases of one worker every ``interval`` seconds."""

    def __init__(self, *, detection_seconds: float, interval: float) -> None:
        self._detection_seconds = detection_seconds
        self._interval = interval
        self._last_check: float | None = None
        self._current: CurrentPhase | None = None
        self._suspended_seconds = 0.0

    def check(self, phases: Phases, *, now: float) -> Stall | None:
        """Return the stall, if there is one."""
        current = phases.current
        if current is not self._current:
            self._current, self._suspended_seconds = current, 0.0
        late = now - self._last_check - self._interval if self._last_check is not None else 0.0
        self._last_check = now
        if late >= self._detection_seconds:
            self._suspended_seconds += late
        if current.phase == "waiting":
            return None
        seconds = now - current.since - self._suspended_seconds
        longest = phases.longest.get(current.phase)
        return Stall(current.phase, seconds, longest) if seconds >= self._limit(current.phase, longest) else None

    def _limit(self, phase: Phase, longest: float | None) -> float:
        is_rare = longest is None or phase == "callback"
        least = FIRST_SECONDS if is_rare else MIN_DETECTIONS * self._detection_seconds
        return max(least, MIN_LONGEST * (longest or 0.0))
