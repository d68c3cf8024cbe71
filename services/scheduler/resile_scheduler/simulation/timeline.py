"""Virtual time: actions are called in the order of their times, and those of one moment as they were added."""

import heapq
from collections.abc import Callable


class Timeline:
    """Virtual time and what is still to happen. ``now`` is in seconds since the epoch."""

    def __init__(self, start: float) -> None:
        self.start = self.now = start
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._num_added = 0

    @property
    def next_time(self) -> float:
        """When the next action is due; infinite if there is none."""
        return self._queue[0][0] if self._queue else float("inf")

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` ``seconds`` from now; a negative time means now."""
        self._num_added += 1
        heapq.heappush(self._queue, (self.now + max(seconds, 0.0), self._num_added, action))

    def step(self) -> bool:
        """Call the next action; return False if there is none."""
        if not self._queue:
            return False
        time, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, time)
        action()
        return True
