"""In which order policies serve the minimums of jobs.

A ranking looks at all jobs that share slots, and returns the key by which they are sorted.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from .deadlines import urgency
from .demand import Demand, Key

PATIENCE_SECONDS = 600.0
"""A job that has waited for so long is due."""


def is_due(demand: Demand) -> bool:
    """Whether the job has waited for so long that its minimum comes before those of jobs that got slots since."""
    return not demand.holds_slots and demand.due_since < inf


def in_turn(demands: Sequence[Demand]) -> Key:
    """Rank the jobs that hold slots before the others, and each of both by priority.

    A job that is due ranks before all that got slots after it had become due, and before those that became due later.
    So as time passes nothing new comes before it. Of equals the one that has attained least ranks first.
    """
    due = sorted(demand.due_since for demand in demands if is_due(demand))

    def key(demand: Demand) -> tuple[float, ...]:
        if demand.holds_slots:
            return 2 * bisect_left(due, demand.holding_since), -demand.priority, 0.0, demand.number
        level = 2 * bisect_left(due, demand.due_since) + 1 if is_due(demand) else inf
        return level, -demand.priority, demand.attained, demand.number

    return key


def by_submission(_: Sequence[Demand]) -> Key:
    """Rank jobs in the order of their submission."""
    return lambda demand: (demand.number,)


def by_priority(_: Sequence[Demand]) -> Key:
    """Rank jobs strictly by priority, and those of equal priority in the order of their submission.

    Of equals those with a deadline that they can meet come first, the earliest before the others.
    """
    return lambda demand: (-demand.priority, urgency(demand), demand.number)
