"""Shares follow priority.

Each job's quota is proportional to its priority, within its minimum and maximum, and quotas are rounded by the largest
remainder. Jobs that hold slots are admitted before new ones, so that none is preempted for a new job.
"""

from collections.abc import Sequence

from .demand import Demand, Target
from .ranking import in_turn
from .shares import admit, at_present_batch, hand_out, largest_remainder, targets, useful, within_sizes


def fairshare(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
    """Shares in proportion to priority."""
    demands = [within_sizes(at_present_batch(demand)) for demand in demands]
    admitted = admit(demands, num_slots, key=in_turn(demands))
    shares = largest_remainder(admitted, num_slots)
    surplus = num_slots - sum(shares.values())
    for demand in admitted:
        enough = max(demand.least, useful(demand, shares[demand.job]))
        surplus += shares[demand.job] - enough
        shares[demand.job] = enough
    hand_out(admitted, shares, surplus, key=lambda d, share: (share / d.priority, -d.priority, d.number))
    return targets(demands, shares, num_slots)
