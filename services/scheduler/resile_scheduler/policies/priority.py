"""One job after the other, the highest priority first.

All get their minimum as long as there is something; the first takes all it can use, then the second. Jobs of low
priority may be preempted. Of equals, those with a deadline that they can meet come first.
"""

from collections.abc import Sequence

from .demand import Demand, Target
from .ranking import by_priority
from .shares import admit, at_present_batch, hand_out, targets, within_sizes


def priority(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
    """The highest priority takes what it can use, then the next."""
    demands = [within_sizes(at_present_batch(demand)) for demand in demands]
    key = by_priority(demands)
    admitted = admit(demands, num_slots, key=key)
    shares = {demand.job: demand.least for demand in admitted}
    surplus = num_slots - sum(shares.values())
    hand_out(admitted, shares, surplus, key=lambda d, _: key(d))
    return targets(demands, shares, num_slots, rule="by priority, beside")
