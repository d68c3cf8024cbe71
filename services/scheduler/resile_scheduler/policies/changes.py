"""What a change of a job's workers costs, and which changes are not worth it.

A change must earn the training that it costs within the time for which it is expected to last: `HOLD_SECONDS`, or what
remains of the job if that is less.
"""

from collections.abc import Sequence
from dataclasses import replace

from .demand import Demand, Policy, Target

HOLD_SECONDS = 300.0
"""For how long a change is expected to be of use."""
SAME_BATCH = 1.5
"""A batch that differs by no more than this factor is not worth a change of its own."""


def lost_share(demand: Demand) -> float:
    """Return which share of the time for which a change lasts is lost by it: from 0 to 1."""
    if demand.change_seconds <= 0.0:
        return 0.0
    left = seconds_left(demand)
    lasting = HOLD_SECONDS if left is None else min(HOLD_SECONDS, left)
    return min(demand.change_seconds / lasting, 1.0) if lasting > 0.0 else 1.0


def seconds_left(demand: Demand, workers: int = 0) -> float | None:
    """Return how long the job still trains with ``workers``, or as many as it has; None if that is not known."""
    workers = workers or demand.assigned_workers or demand.least
    throughput = demand.throughput
    if throughput is None or not throughput.num_measured or demand.iterations_total is None or not demand.batch_size:
        return None
    left = max(demand.iterations_total - demand.iteration, 0)
    across = demand.slots_per_host is not None and workers > demand.slots_per_host
    return left * throughput.seconds_of(workers, demand.batch_size, across=across)


def steadily(policy: Policy) -> Policy:
    """Return ``policy`` without changes of a batch alone that are hardly noticed."""

    def decide(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        targets = policy(demands, num_slots)
        return {demand.job: _steady(demand, targets[demand.job]) for demand in demands}

    return decide


def _steady(demand: Demand, target: Target) -> Target:
    has = demand.assigned_workers
    if target.is_exact or not has:
        return target
    if target.workers == has and target.batch_size and demand.batch_size:
        larger, smaller = max(target.batch_size, demand.batch_size), min(target.batch_size, demand.batch_size)
        if smaller < larger <= SAME_BATCH * smaller:
            return replace(target, batch_size=demand.batch_size)
    return target
