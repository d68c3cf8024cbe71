"""The policies that look at priorities and order alone, not at speed; and that of a pool that is about to stop.

- `fairshare`: shares follow priority. Each job's quota is proportional to its priority, within its minimum and maximum,
  and quotas are rounded by the largest remainder. Jobs that hold slots are admitted before new ones, so that none is
  preempted for a new job.
- `priority`: one job after the other, the highest priority first. All get their minimum as long as there is something;
  the first takes all it can use, then the second. Jobs of low priority may be preempted. Of equals, those with a
  deadline that they can meet come first.
- `fifo`: in the order of submission, each job takes all it can use, then the next. Smaller later jobs pass a job whose
  minimum does not fit, until it does. Priorities do not count.
"""

from collections.abc import Sequence

from .demand import Demand, Target
from .ranking import by_priority, by_submission, in_turn
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


def priority(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
    """The highest priority takes what it can use, then the next."""
    demands = [within_sizes(at_present_batch(demand)) for demand in demands]
    key = by_priority(demands)
    admitted = admit(demands, num_slots, key=key)
    shares = {demand.job: demand.least for demand in admitted}
    surplus = num_slots - sum(shares.values())
    hand_out(admitted, shares, surplus, key=lambda d, _: key(d))
    return targets(demands, shares, num_slots, rule="by priority, beside")


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


def no_slots(demands: Sequence[Demand], _: int) -> dict[str, Target]:
    """Nothing for any job: the pool is about to stop."""
    return {demand.job: Target(0, "the pool is stopping: it continues when the pool is up again") for demand in demands}
