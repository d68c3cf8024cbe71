"""What a worker sees of failures: silent peers, members that it suspects, its own main thread that makes no progress.

Pure: times are arguments.

Every worker sends each of its peers a heartbeat several times per ``detection_seconds``. A peer from which nothing
arrives for ``detection_seconds`` is frozen, or the network path from it is cut. Time in which this worker itself did
not run is not counted: what the peers sent meanwhile is still to be read.

A suspicion is of one generation. It is repeated until a newer one is active, since one that is not repeated for
``detection_seconds`` expires.

A phase of the main thread has stalled when it lasts longer than twenty times ``detection_seconds`` and ten times the
longest that it has taken so far in this worker. A phase that has not occurred before may take ten minutes: a first
iteration may compile. So may a callback each time, as it may do something rare. Waiting for other workers never counts
as a stall: they detect their own. Time in which the whole process did not run for ``detection_seconds`` or longer does
not count.
"""

from dataclasses import dataclass

from resile_shared.messages.reports import Evidence

from ..messages import PeerSuspected
from ..phases import CurrentPhase, Phase, Phases

HEARTBEATS_PER_DETECTION = 20
REPEATS_PER_DETECTION = 3
FIRST_SECONDS = 600.0
MIN_DETECTIONS = 20
MIN_LONGEST = 10


class PeerLiveness:
    """When each peer was last heard from. All times are seconds on one clock."""

    def __init__(self, *, detection_seconds: float) -> None:
        self.interval = detection_seconds / HEARTBEATS_PER_DETECTION
        self._detection_seconds = detection_seconds
        self._last_received: dict[int, float] = {}
        self._last_check: float | None = None

    def record(self, peer: int, *, now: float) -> None:
        """Something has arrived from ``peer``."""
        self._last_received[peer] = now

    def remove(self, peer: int) -> None:
        """Nothing is expected from ``peer`` any more."""
        self._last_received.pop(peer, None)

    def take_silent(self, *, now: float) -> list[int]:
        """Return the peers that have fallen silent, and remove them. To be called every ``interval``."""
        late = now - self._last_check - self.interval if self._last_check is not None else 0.0
        if late > self.interval:
            self._last_received = {peer: min(last + late, now) for peer, last in self._last_received.items()}
        self._last_check = now
        silent = sorted(peer for peer, last in self._last_received.items() if now - last >= self._detection_seconds)
        for peer in silent:
            self.remove(peer)
        return silent


class Suspicions:
    """The suspicions of worker ``worker``. All times are seconds on one clock."""

    def __init__(self, worker: int, *, detection_seconds: float) -> None:
        self._worker = worker
        self._interval = detection_seconds / REPEATS_PER_DETECTION
        self._reported: dict[int, tuple[PeerSuspected, float]] = {}  # by suspect, with the time of the last report
        self._is_complete = False

    def add(
        self, suspect: int, evidence: Evidence, reason: str, *, generation: int | None, now: float
    ) -> PeerSuspected | None:
        """Suspect a member of ``generation``, which was the current one; return what to report, if that is new."""
        known = self._reported.get(suspect)
        if self._is_complete or generation is None or (known and known[0].generation >= generation):
            return None
        message = PeerSuspected(
            worker=self._worker, generation=generation, suspect=suspect, evidence=evidence, reason=reason
        )
        self._reported[suspect] = message, now
        return message

    def complete(self) -> None:
        """Suspect nobody from now on: training is complete here, and nobody is missed."""
        self._is_complete = True
        self._reported.clear()

    def due(self, *, generation: int | None, now: float) -> list[PeerSuspected]:
        """Return what to report again, and forget the suspicions of older generations."""
        self._reported = {
            suspect: known for suspect, known in self._reported.items() if known[0].generation == generation
        }
        due = [message for message, reported in self._reported.values() if now - reported >= self._interval]
        for message in due:
            self._reported[message.suspect] = message, now
        return due


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
