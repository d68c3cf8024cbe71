"""Whether a worker's own main thread still comes on, as its control thread sees it. Pure: times come in.

A phase is overdue when it lasts longer than twenty times ``detection_seconds`` and ten times the longest that it has
taken so far in this worker. What has not been done before may take ten minutes: a first iteration may compile. So may
a callback each time, as it may do something rare. Waiting for others is never overdue: they watch themselves. Time in
which the whole process stood still for ``detection_seconds`` or longer does not count.
"""

from dataclasses import dataclass

from ..phases import CurrentPhase, Phase, Phases

FIRST_SECONDS = 600.0
MIN_DETECTIONS = 20
MIN_LONGEST = 10


@dataclass(frozen=True)
class Overdue:
    """A phase that does not come to its end."""

    phase: Phase
    seconds: float
    longest: float | None
    """What it took at most before; None: it was never done before."""

    def __str__(self) -> str:
        before = "it was its first" if self.longest is None else f"it took at most {self.longest:.2g} s before"
        return f"stuck in {self.phase} for {self.seconds:.3g} s; {before}"


class Watch:
    """Looks at the phases of one worker every ``interval`` seconds."""

    def __init__(self, *, detection_seconds: float, interval: float) -> None:
        self._detection_seconds = detection_seconds
        self._interval = interval
        self._looked: float | None = None
        self._current: CurrentPhase | None = None
        self._stood_still = 0.0

    def look(self, phases: Phases, *, now: float) -> Overdue | None:
        """Return what is overdue, if anything is."""
        current = phases.current
        if current is not self._current:
            self._current, self._stood_still = current, 0.0
        late = now - self._looked - self._interval if self._looked is not None else 0.0
        self._looked = now
        if late >= self._detection_seconds:
            self._stood_still += late
        if current.phase == "waiting":
            return None
        seconds = now - current.since - self._stood_still
        longest = phases.longest.get(current.phase)
        return Overdue(current.phase, seconds, longest) if seconds >= self._limit(current.phase, longest) else None

    def _limit(self, phase: Phase, longest: float | None) -> float:
        is_rare = longest is None or phase == "callback"
        least = FIRST_SECONDS if is_rare else MIN_DETECTIONS * self._detection_seconds
        return max(least, MIN_LONGEST * (longest or 0.0))
