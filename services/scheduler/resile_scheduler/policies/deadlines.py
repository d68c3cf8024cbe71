"""Deadlines, which are wishes: a job that would miss its own is served first, if it can still meet it.

How many workers a job needs follows from what it has measured. One that has measured nothing, or that no number of its
workers would bring to its end in time, is served like one without a deadline.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from .changes import seconds_left
from .demand import Demand
from .shares import within_sizes

USABLE = 0.9
"""The share of the time left in which a job has to be complete: estimates are off by a few percent."""


def workers_needed(demand: Demand) -> int | None:
    """Return the fewest workers with which the job meets its deadline; None: it has none, or cannot meet it."""
    if demand.deadline_seconds is None:
        return None
    for workers in demand.sizes or range(demand.least, demand.most + 1):
        if demand.least <= workers <= demand.most:
            left = seconds_left(demand, workers)
            if left is not None and left + demand.change_seconds <= USABLE * demand.deadline_seconds:
                return workers
    return None


def urgency(demand: Demand) -> float:
    """Return the seconds until a deadline that the job can still meet; infinite without one."""
    seconds = demand.deadline_seconds
    return inf if seconds is None or workers_needed(demand) is None else seconds


def with_needed(demands: Sequence[Demand], num_slots: int) -> list[Demand]:
    """Return the demands with the workers that deadlines need as minimums, as long as all minimums fit.

    The highest priority comes first, and then the earliest deadline.
    """
    wishing = [demand for demand in demands if demand.deadline_seconds is not None]
    if not wishing:
        return list(demands)
    raised = {demand.job: demand for demand in demands}
    fitting = {demand.job: within_sizes(demand) for demand in demands}
    left = num_slots - sum(demand.least for demand in fitting.values() if demand.least <= demand.most)
    for demand in sorted(wishing, key=lambda d: (-d.priority, d.deadline_seconds or 0.0, d.number)):
        least = fitting[demand.job].least
        more = (workers_needed(demand) or 0) - least
        if 0 < more <= left:
            raised[demand.job] = replace(demand, least=least + more)
            left -= more
    return list(raised.values())
