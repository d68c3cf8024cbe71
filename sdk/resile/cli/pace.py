"""The speed of a run."""

from collections import deque

WINDOW_SECONDS = 10.0


class Pace:
    """Iterations per second over a sliding window, and the remaining time at that speed."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, iteration: int, now: float) -> None:
        """Record that ``iteration`` iterations were complete at ``now``."""
        self._points.append((now, iteration))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_SECONDS:
            self._points.popleft()

    @property
    def per_second(self) -> float | None:
        """Iterations per second; None before there are two points."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    def seconds_left(self, iterations: int) -> float | None:
        """Return the seconds that ``iterations`` more will take."""
        speed = self.per_second
        return iterations / speed if speed else None


def clock(seconds: float) -> str:
    """For example ``7 s``, ``3:05`` or ``1:02:30``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
