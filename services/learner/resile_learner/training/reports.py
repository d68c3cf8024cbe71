"""How often the lowest rank tells of its progress."""

import time
from collections.abc import Callable

from ..messages import Progress
from .session import Session

PROGRESS_SECONDS = 0.1


class Reports:
    """Sends a progress message at most every tenth of a second, and measures the time of an iteration."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent = 0.0
        self._committed: float | None = None
        self.iteration_seconds = 0.0

    def committed(self, progress: Callable[[], Progress], *, always: bool) -> None:
        """An iteration was committed; tell of it if it is time, or ``always``."""
        now = time.perf_counter()
        if self._committed is not None:
            self.iteration_seconds = now - self._committed
        self._committed = now
        if always or now - self._sent >= PROGRESS_SECONDS:
            self._sent = now
            self._session.report(progress())
