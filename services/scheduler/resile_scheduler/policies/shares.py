"""Steps that policies have in common: who is admitted, quotas, rounding, and handing out what is left."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from .demand import Demand, Target

Shares = dict[str, int]


def admit(
    demands: Iterable[Demand], num_slots: int, *, key: Callable[[Demand], tuple[bool | int, ...]]
) -> list[Demand]:
    """Return those whose minimums fit together, taken in the order of ``key``; a smaller one may pass a larger one."""
    admitted = []
    for demand in sorted(demands, key=key):
        if 0 < demand.least <= demand.most and demand.least <= num_slots:
            admitted.append(demand)
            num_slots -= demand.least
    return admitted


def largest_remainder(admitted: Sequence[Demand], num_slots: int) -> Shares:
    """Round the quotas to whole slots: each down, and what is left to the largest remainders."""
    quotas = _quotas(admitted, num_slots)
    shares = {job: int(quota) for job, quota in quotas.items()}
    left = int(sum(quotas.values())) - sum(shares.values())
    by_remainder = sorted(admitted, key=lambda d: (shares[d.job] - quotas[d.job], -d.priority, d.number))
    for demand in by_remainder[:left]:
        shares[demand.job] += 1
    return shares


def _quotas(admitted: Sequence[Demand], num_slots: int) -> dict[str, Fraction]:
    """Return ``clamp(level * priority, least, most)`` for each job, with the level at which all slots are used.

    The sum rises with the level, and is linear between the levels at which a job meets its minimum or maximum.
    """

    def at_level(level: Fraction) -> dict[str, Fraction]:
        return {d.job: min(max(level * d.priority, Fraction(d.least)), Fraction(d.most)) for d in admitted}

    def used(level: Fraction) -> Fraction:
        return sum(at_level(level).values(), start=Fraction(0))

    levels = sorted({Fraction(0), *(Fraction(limit, d.priority) for d in admitted for limit in (d.least, d.most))})
    above = bisect_left(levels, Fraction(num_slots), key=used)
    if above == len(levels):
        return at_level(levels[-1])
    if above == 0:
        return at_level(levels[0])
    low, high = levels[above - 1], levels[above]
    return at_level(low + (high - low) * (num_slots - used(low)) / (used(high) - used(low)))


def useful(demand: Demand, share: int) -> int:
    """Return the smallest number of workers that is as fast as ``share``."""
    if demand.num_shards is None or share == 0:
        return share
    per_worker = -(-demand.num_shards // share)
    return -(-demand.num_shards // per_worker)


def _next_useful(demand: Demand, share: int) -> int:
    """Return the next larger number of workers that is faster than ``share``; more than ``most`` if there is none."""
    if demand.num_shards is None:
        return share + 1
    per_worker = -(-demand.num_shards // share)
    return -(-demand.num_shards // (per_worker - 1)) if per_worker > 1 else demand.most + 1


def hand_out(
    admitted: Sequence[Demand],
    shares: Shares,
    surplus: int,
    *,
    key: Callable[[Demand, int], tuple[Fraction | int, ...]],
) -> None:
    """Give the surplus to the first job by ``key`` that gains by it; then to the first that can hold it."""
    while surplus:
        able = [d for d in admitted if _next_useful(d, shares[d.job]) <= min(d.most, shares[d.job] + surplus)]
        holding = [d for d in admitted if shares[d.job] < d.most]
        if not holding:
            return
        first = min(able or holding, key=lambda d: key(d, shares[d.job]))
        more = _next_useful(first, shares[first.job]) - shares[first.job] if able else 1
        shares[first.job] += more
        surplus -= more


def targets(demands: Sequence[Demand], shares: Shares, num_slots: int) -> dict[str, Target]:
    """Return the target of each job: its share, or nothing, and the reason."""
    return {d.job: Target(shares.get(d.job, 0), _reason(d, demands, shares, num_slots)) for d in demands}


def _reason(demand: Demand, demands: Sequence[Demand], shares: Shares, num_slots: int) -> str:
    """Say why a job gets what it gets, or what it is waiting for."""
    if demand.job in shares:
        others = [job for job in shares if job != demand.job]
        if shares[demand.job] == demand.most or not others:
            return "all it can use"
        return f"fair share with {_names(others)}"
    if num_slots == 0:
        return "waiting for a host: the pool has no slots"
    if demand.least > min(num_slots, demand.most):
        return f"waiting for hosts: its minimum is {demand.least} and it can have at most {min(num_slots, demand.most)}"
    wanted = f"{demand.least} slots" if demand.least > 1 else "a slot"
    return f"waiting for {wanted}: the minimums of {_names(list(shares))} leave fewer"


def _names(jobs: Sequence[str]) -> str:
    shown = sorted(jobs)[:3]
    return ", ".join(shown) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
