"""In which order policies serve the minimums of jobs.

A ranking looks at all jobs that share slots, and returns the key by which they are sorted.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

from .deadlines import urgency
from .demand import Demand, Key

PATIENCE_SECONDS = 600.0
"""A job that has waited for this long is due."""


def is_due(demand: Demand) -> bool:
    """Whether the job has waited so long that its minimum comes before those of jobs that got slots since."""
    return not demand.holds_slots and demand.due_since < inf


def turn(demands: Sequence[Demand]) -> Callable[[Demand], float]:
    """Return which turn the minimum of a job has.

    A job that is due comes before all that got slots after it had become due, and before those that became due later.
    So as time passes no new job comes before it. Those that hold slots come before those that wait and are not due.
    """
    due = sorted(demand.due_since for demand in demands if is_due(demand))

    def turn_of(demand: Demand) -> float:
        if demand.holds_slots:
            return 2 * bisect_left(due, demand.holding_since)
        return 2 * bisect_left(due, demand.due_since) + 1 if is_due(demand) else inf

    return turn_of


def in_turn(demands: Sequence[Demand]) -> Key:
    """Rank jobs by their turns, and those of the same turn by priority.

    Of equals the one that has attained least ranks first.
    """
    turn_of = turn(demands)

    def key(demand: Demand) -> tuple[float, ...]:
        attained = 0.0 if demand.holds_slots else demand.attained
        return turn_of(demand), -demand.priority, attained, demand.number

    return key


def by_submission(_: Sequence[Demand]) -> Key:
    """Rank jobs in the order of their submission."""
    return lambda demand: (demand.number,)


def by_priority(_: Sequence[Demand]) -> Key:
    """Rank jobs strictly by priority, and those of equal priority in the order of their submission.

    Of equals those with a deadline that they can meet come first, the earliest before the others.
    """
    return lambda demand: (-demand.priority, urgency(demand), demand.number)
