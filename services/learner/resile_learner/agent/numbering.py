"""The numbers of workers that were placed on this host, as a memory of those that have ended.

The workers of a job are numbered in the order in which allocations name them. So a worker that the agent does not know
any more, and whose number is not above those that were placed here before, has ended.
"""

from collections.abc import Iterable

MAX_JOBS = 10_000
"""At most this many jobs are remembered: those that were here last."""


class HighestNumbers:
    """The highest number of each job's workers that were placed here."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}  # the job that came last is at the end

    def has_placed(self, job: str, worker: int) -> bool:
        """Return whether ``worker``, or one that was named after it, was placed here."""
        return worker <= self._highest.get(job, -1)

    def record(self, job: str, placed: Iterable[int]) -> None:
        """Record that the workers ``placed`` of ``job`` are placed here."""
        highest = max(self._highest.pop(job, -1), *placed, -1)
        if highest >= 0:
            self._highest[job] = highest
        if len(self._highest) > MAX_JOBS:
            del self._highest[next(iter(self._highest))]
