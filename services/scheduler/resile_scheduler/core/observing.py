"""When policies see what was observed of jobs: at most every `OBSERVE_SECONDS`, and then they decide again."""

from math import inf

from .accounting import attained
from .observations import OBSERVE_SECONDS
from .pool import Pool


class Observing:
    """Shows policies from time to time what jobs have measured."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last = -inf

    def check(self, *, now: float) -> None:
        """Request a decision if it is time for one and something was observed."""
        if now - self._last < OBSERVE_SECONDS:
            return
        self._last = now
        for job in self._pool.jobs.values():
            if job.is_over:
                continue
            deadline = job.record.spec.deadline
            left = deadline.timestamp() - now if deadline else None
            if job.observer.observe(attained=attained(job, now=now), deadline_seconds=left):
                self._pool.changed(job)
