"""What a change of a job's workers costs.

A change must earn the training that it costs within the time for which it is expected to last: `HOLD_SECONDS`, or what
remains of the job if that is less.
"""

from .demand import Demand

HOLD_SECONDS = 300.0
"""How long a change is expected to be useful."""
MOST_LOST = 0.99
"""The largest share that a change counts as losing: a job that cannot earn its start still makes some progress."""


def lost_share(demand: Demand) -> float:
    """Return the share of the time that a change lasts which the change costs: at most `MOST_LOST`."""
    if demand.change_seconds <= 0.0:
        return 0.0
    left = seconds_left(demand)
    lasting = HOLD_SECONDS if left is None else min(HOLD_SECONDS, left)
    return min(demand.change_seconds / lasting, MOST_LOST) if lasting > 0.0 else MOST_LOST


def seconds_left(demand: Demand, workers: int = 0) -> float | None:
    """Return how long the job still trains with ``workers``, or as many as it has; None if that is not known."""
    workers = workers or demand.assigned_workers or demand.least
    throughput = demand.throughput
    if throughput is None or not throughput.num_measured or demand.iterations_total is None or not demand.batch_size:
        return None
    left = max(demand.iterations_total - demand.iteration, 0)
    return left * throughput.seconds_of(workers, demand.batch_size, across=demand.is_across(workers))
