"""Which members this worker suspects to be lost, and when it says so to its agent. Pure: times are arguments.

A suspicion is of one generation. It is repeated until a newer one is active, since one that is not repeated for
``detection_seconds`` expires.
"""

from resile_shared.messages.reports import Evidence

from ..messages import PeerSuspected

REPEATS_PER_DETECTION = 3


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
