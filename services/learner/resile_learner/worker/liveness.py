"""Which peers have fallen silent, as one worker sees it. Pure: times are arguments.

Every worker sends each of its peers a heartbeat several times per ``detection_seconds``. A peer from which nothing
arrives for ``detection_seconds`` is frozen, or the network path from it is cut. Time in which this worker itself did
not run is not counted: what the peers sent meanwhile is still to be read.
"""

HEARTBEATS_PER_DETECTION = 20


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
