"""In the order of submission: each job takes all it can use, then the next.

Smaller later jobs pass a job whose minimum does not fit, until it does. Priorities do not count.
"""

from collections.abc import Sequence

from .demand import Demand, Target
from .ranking import by_submission
from .shares import admit, at_present_batch, hand_out, targets, useful, within_sizes


def fifo(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
    """The job that was submitted first takes all it can use, then the next."""
    demands = [within_sizes(at_present_batch(demand)) for demand in demands]
    queue = sorted(demands, key=lambda d: d.number)
    keeping = admit([d for d in queue if not d.is_preemptible], num_slots, key=by_submission(demands))
    shares = {demand.job: demand.least for demand in keeping}
    left = num_slots - sum(shares.values())
    for demand in queue:
        has = shares.get(demand.job, 0)
        most = min(demand.most, has + left)
        if 0 < demand.least <= most:
            shares[demand.job] = max(demand.least, useful(demand, most))
            left -= shares[demand.job] - has
    hand_out([d for d in queue if d.job in shares], shares, left, key=lambda d, _: (d.number,))
    return targets(demands, shares, num_slots, rule="in the order of submission, beside", waiting="{} leave fewer")
