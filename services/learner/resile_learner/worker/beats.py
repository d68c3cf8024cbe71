"""Which peers have fallen silent, as one worker sees it. Pure: times come in.

Every worker writes to each of its peers all the time, if only an empty line. A peer of which nothing is heard for
``detection_seconds`` is frozen, or the way from it is cut. Time in which this worker itself stood still counts against
nobody: what was said meanwhile is still to be read.
"""

BEATS_PER_DETECTION = 20
BEAT = b"\n"


class Beats:
    """When each peer was heard last. All times are seconds on one clock."""

    def __init__(self, *, detection_seconds: float) -> None:
        self.interval = detection_seconds / BEATS_PER_DETECTION
        self._detection_seconds = detection_seconds
        self._heard: dict[int, float] = {}
        self._looked: float | None = None

    def hear(self, peer: int, *, now: float) -> None:
        """Something has come from ``peer``."""
        self._heard[peer] = now

    def forget(self, peer: int) -> None:
        """Nothing is expected of ``peer`` any more."""
        self._heard.pop(peer, None)

    def silent(self, *, now: float) -> list[int]:
        """Return, once, the peers that have fallen silent. Due every ``interval``."""
        late = now - self._looked - self.interval if self._looked is not None else 0.0
        if late > self.interval:
            self._heard = {peer: min(heard + late, now) for peer, heard in self._heard.items()}
        self._looked = now
        silent = sorted(peer for peer, heard in self._heard.items() if now - heard >= self._detection_seconds)
        for peer in silent:
            self.forget(peer)
        return silent
