"""When policies see what was observed of jobs: at most every `OBSERVE_SECONDS`, and then they decide again.

The first measurements of a job with more workers than ever are seen sooner. Until then the policy has only guessed what
these are worth, and other jobs may be waiting for them.
"""

from collections.abc import Iterable
from math import inf

from .accounting import attained
from .state.job import Job
from .state.observations import OBSERVE_SECONDS
from .state.pool import Pool

GROWTH_SECONDS = 5.0
"""The least number of seconds between two decisions because jobs have measured more workers than ever."""


class ObservationTimer:
    """Shows policies from time to time what jobs have measured."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last = -inf
        self._last_growth = -inf
        self._grown: set[str] = set()
        """Jobs that have measured more workers than ever since policies last saw their measurements."""

    def on_report(self, job: str, *, now: float) -> None:
        """Check whether ``job`` has measured more workers than ever."""
        known = self._pool.jobs.get(job)
        if known is not None and known.observer.has_grown:
            self._grown.add(job)
            self._check_grown(now)

    def check(self, *, now: float) -> None:
        """Request a decision if it is time for one and something was observed."""
        if now - self._last < OBSERVE_SECONDS:
            self._check_grown(now)
            return
        self._last = self._last_growth = now
        self._grown.clear()
        self._observe(self._pool.jobs.values(), now)

    def _check_grown(self, now: float) -> None:
        if self._grown and now - self._last_growth >= GROWTH_SECONDS:
            grown, self._grown, self._last_growth = self._grown, set(), now
            self._observe([job for name, job in self._pool.jobs.items() if name in grown], now)

    def _observe(self, jobs: Iterable[Job], now: float) -> None:
        for job in jobs:
            if job.is_over:
                continue
            deadline = job.record.spec.deadline
            left = deadline.timestamp() - now if deadline else None
            if job.observer.observe(attained=attained(job, now=now), deadline_seconds=left):
                self._pool.changed(job)
