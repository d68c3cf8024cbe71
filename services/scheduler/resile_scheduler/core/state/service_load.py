"""How many replicas a service needs, by the requests that its replicas have; pure.

A service grows as soon as its replicas have more requests than they should, and shrinks to what it needed at most in
the last `CALM_SECONDS`: a short pause between two requests costs no replica.
"""

from collections import deque
from collections.abc import Container
from math import ceil

CALM_SECONDS = 15.0


class ServiceLoad:
    """The requests that each replica had on average, as agents reported it last."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        """How many replicas it needs; None: no agent has reported since this scheduler leads."""
        self._in_flight: dict[int, float] = {}
        self._needs: deque[tuple[float, int]] = deque()

    @property
    def in_flight(self) -> float:
        """The requests that its replicas have."""
        return sum(self._in_flight.values())

    def see(self, worker: int, in_flight: float) -> None:
        """Take over how many requests a replica had, on average since the last report."""
        self._in_flight[worker] = in_flight

    def update(self, alive: Container[int], *, per_replica: float, now: float) -> bool:
        """Find how many replicas are needed, of which ``alive`` can have requests; return whether that has changed."""
        self._in_flight = {worker: number for worker, number in self._in_flight.items() if worker in alive}
        self._needs.append((now, ceil(self.in_flight / per_replica)))
        while self._needs[0][0] <= now - CALM_SECONDS:
            self._needs.popleft()
        before, self.wanted = self.wanted, max(need for _, need in self._needs)
        return before != self.wanted
