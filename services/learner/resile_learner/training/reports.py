"""How often the lowest rank tells of its progress, and what it tells of members that are slow."""

import time
from collections.abc import Callable

from ..messages import Progress, Warned
from .rounds import RoundResult
from .session import Session
from .stragglers import Stragglers

PROGRESS_SECONDS = 0.1


class Reports:
    """Sends a progress message at most every tenth of a second, and measures the time of an iteration.

    Every member compares the paces of all, so that whoever becomes the lowest rank knows what was said already.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent = 0.0
        self._committed: float | None = None
        self._stragglers = Stragglers()
        self.iteration_seconds = 0.0
        self.last = (0, 0.0)
        """Of the newest iteration: see `RoundResult`."""

    def committed(self, progress: Callable[[], Progress], *, always: bool) -> None:
        """An iteration was committed; tell of it if it is time, or ``always``."""
        now = time.perf_counter()
        if self._committed is not None:
            self.iteration_seconds = now - self._committed
        self._committed = now
        if always or now - self._sent >= PROGRESS_SECONDS:
            self._sent = now
            self._session.report(progress())

    def members_changed(self) -> None:
        """From now on the members of another generation are compared."""
        self._session.phases.take_seconds(())
        self._stragglers.members_are(self._session.view.workers, now=time.monotonic())
        self.last = (0, 0.0)

    def measured(self, outcome: RoundResult) -> None:
        """Take in how long each member took for an iteration; the lowest rank tells who is slower than the others."""
        self.last = outcome.last
        words = self._stragglers.measured([header.pace for header in outcome.headers], now=time.monotonic())
        view = self._session.view
        for text in words if view.rank == 0 else ():
            self._session.report(Warned(worker=view.me, message=text))
