"""Steps that policies have in common: who is admitted, quotas, rounding, and handing out what is left."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heapreplace, nsmallest
from operator import attrgetter

from .demand import Demand, Key, Target

Shares = dict[str, int]
ALL_IT_CAN_USE = "all it can use"
MINIMUMS_LEAVE_FEWER = "the minimums of {} leave fewer"
Limits = tuple[int, int, int]
"""A weight, and the least and the most slots that it may get."""


def within_sizes(demand: Demand) -> Demand:
    """Return the demand with the least and the largest of its allowed sizes as its minimum and maximum.

    If none is possible, its minimum is above its maximum.
    """
    if demand.sizes is None:
        return demand
    least = size_from(demand, demand.least)
    return replace(demand, least=least, most=size_up_to(demand, demand.most) if least <= demand.most else demand.most)


def at_present_batch(demand: Demand) -> Demand:
    """Return the demand with no more workers than its batch has samples for: for policies that choose no batches."""
    if demand.batch is None or not demand.batch_size:
        return demand
    most = max(demand.batch_size // max(demand.batch.least_per_slot, 1), size_from(demand, demand.least))
    return demand if most >= demand.most else replace(demand, most=most, num_shards=most)


def size_up_to(demand: Demand, number: int) -> int:
    """Return the largest allowed number of workers up to ``number``; 0 if there is none."""
    if demand.sizes is None:
        return number
    end = bisect_right(demand.sizes, number)
    return demand.sizes[end - 1] if end else 0


def size_from(demand: Demand, number: int) -> int:
    """Return the smallest allowed number of workers from ``number`` on; more than its maximum if there is none."""
    if demand.sizes is None:
        return number
    begin = bisect_left(demand.sizes, number)
    return demand.sizes[begin] if begin < len(demand.sizes) else demand.most + 1


def admit(demands: Iterable[Demand], num_slots: int, *, key: Key) -> list[Demand]:
    """Return those whose minimums fit together, taken in the order of ``key``; a smaller one may pass a larger one.

    Jobs that are not preemptible come first.
    """
    admitted = []
    for demand in sorted(sorted(demands, key=key), key=attrgetter("is_preemptible")):
        if 0 < demand.least <= demand.most and demand.least <= num_slots:
            admitted.append(demand)
            num_slots -= demand.least
    return admitted


def largest_remainder(admitted: Sequence[Demand], num_slots: int) -> Shares:
    """Divide the slots in proportion to priorities, between minimums and maximums."""
    ranked = sorted(sorted(admitted, key=attrgetter("number")), key=attrgetter("priority"), reverse=True)
    shares = divide([(d.priority, d.least, d.most) for d in ranked], num_slots)
    return {demand.job: share for demand, share in zip(ranked, shares, strict=True)}


def divide(limits: Sequence[Limits], num_slots: int) -> list[int]:
    """Divide slots in proportion to weights: ``clamp(level * weight, least, most)``, for one level.

    ``limits`` are weights above 0, and the least and the most of each. Quotas are rounded down, and what is left goes
    to the largest remainders, of equal ones to the first.
    """
    quotas, unit = _quotas(limits, num_slots)
    shares = [quota // unit for quota in quotas]
    left = sum(quotas) // unit - sum(shares)
    remainders = [-(quota % unit) for quota in quotas]
    for index in sorted(range(len(quotas)), key=remainders.__getitem__)[:left]:
        shares[index] += 1
    return shares


def _quotas(limits: Sequence[Limits], num_slots: int) -> tuple[list[int], int]:
    """Return ``clamp(level * weight, least, most)`` for each, with the level at which all slots are used.

    They are exact: whole numbers of units, and how many units are one slot.
    """
    numbers = Counter(limits)
    slots, per = _level(numbers, num_slots)
    quotas = {
        (weight, least, most): min(max(slots * weight, least * per), most * per) for weight, least, most in numbers
    }
    return [quotas[each] for each in limits], per


def _level(numbers: Mapping[Limits, int], num_slots: int) -> tuple[int, int]:
    """Return the level at which all slots are used, or the highest that is of use, as a fraction.

    ``numbers`` says how many have which limits.

    The slots that are used rise with the level. They are ``slope * level + fixed`` between the levels at which one
    meets its least or its most.
    """
    steps = [(least, weight, num * weight, -num * least) for (weight, least, _), num in numbers.items()]
    steps += [(most, weight, -num * weight, num * most) for (weight, _, most), num in numbers.items()]
    # Floats order them rightly: those of two different levels differ as long as limit x weight is below 2**52.
    steps.sort(key=lambda step: step[0] / step[1])
    slope, fixed, last = 0, sum(num * least for (_, least, _), num in numbers.items()), (0, 1)
    for limit, weight, steeper, more in steps:
        if slope * limit + fixed * weight >= num_slots * weight:
            return (num_slots - fixed, slope) if slope else last
        slope, fixed, last = slope + steeper, fixed + more, (limit, weight)
    return last


def useful(demand: Demand, share: int) -> int:
    """Return the smallest allowed number of workers that is as fast as the largest allowed one up to ``share``."""
    share = size_up_to(demand, share)
    if demand.num_shards is None or share == 0:
        return share
    per_worker = -(-demand.num_shards // share)
    return size_from(demand, -(-demand.num_shards // per_worker))


def _next_useful(demand: Demand, share: int) -> int:
    """Return the next larger number of workers that is faster than ``share``; more than ``most`` if there is none."""
    if demand.num_shards is None:
        return size_from(demand, share + 1)
    per_worker = -(-demand.num_shards // share)
    faster = -(-demand.num_shards // (per_worker - 1)) if per_worker > 1 else demand.most + 1
    return size_from(demand, faster)


def _next_slot(demand: Demand, share: int) -> int:
    return size_from(demand, share + 1)


def hand_out(
    admitted: Sequence[Demand], shares: Shares, surplus: int, *, key: Callable[[Demand, int], tuple[float, ...]]
) -> None:
    """Give the surplus to jobs that gain by it, ordered by ``key`` of job and share; then to those that can hold it.

    A job that cannot use what is left will not be able to later: what is left only becomes less.
    """
    if not surplus:
        return
    for step in (_next_useful, _next_slot):
        queue = [(key(d, shares[d.job]), number) for number, d in enumerate(admitted)]
        heapify(queue)
        while queue and surplus:
            demand = admitted[queue[0][1]]
            share = step(demand, shares[demand.job])
            more = share - shares[demand.job]
            if share > demand.most or more > surplus:
                heappop(queue)
                continue
            shares[demand.job] = share
            surplus -= more
            heapreplace(queue, (key(demand, share), queue[0][1]))


def targets(
    demands: Sequence[Demand],
    shares: Shares,
    num_slots: int,
    *,
    rule: str = "fair share with",
    waiting: str = MINIMUMS_LEAVE_FEWER,
) -> dict[str, Target]:
    """Return the target of each job: its share, or nothing, and the reason.

    ``rule`` precedes the names of the jobs with which it shares, ``waiting`` has a place for those it waits for.
    """
    first, num = nsmallest(4, shares), len(shares)
    waiting, others = what_leaves_fewer(demands, waiting), f"{rule} {_names(first, num - 1)}"

    def reason(demand: Demand) -> str:
        if demand.job not in shares:
            return reason_to_wait(demand, num_slots, waiting.format(_names(first, num)))
        if shares[demand.job] == demand.most or num == 1:
            return ALL_IT_CAN_USE
        if shares[demand.job] == demand.least and demand.keeps_all:
            return "it keeps what it has: preemption is off"
        if demand.job not in first:
            return others
        return f"{rule} {_names([job for job in first if job != demand.job], num - 1)}"

    return {demand.job: _target(shares.get(demand.job, 0), reason(demand)) for demand in demands}


def what_leaves_fewer(demands: Iterable[Demand], waiting: str = MINIMUMS_LEAVE_FEWER) -> str:
    """Return why minimums do not fit: ``waiting``, unless some of ``demands`` keep their slots whatever the policy."""
    kept = [demand for demand in demands if not demand.is_preemptible]
    if not kept:
        return waiting
    if any(demand.keeps_all for demand in kept):
        return "preemption is off, and {} leave fewer"
    return f"{_names(nsmallest(4, (demand.job for demand in kept)), len(kept))} cannot be preempted, and {waiting}"


_target = lru_cache(maxsize=4096)(Target)
"""Returns cached targets: most jobs of a large pool have one of a few, the same as in the decision before."""


def reason_to_wait(demand: Demand, num_slots: int, others: str) -> str:
    """Say what the job is waiting for; ``others`` why its minimum does not fit."""
    if num_slots == 0:
        return "waiting for a host: the pool has no slots"
    if demand.least > min(num_slots, demand.most):
        return f"waiting for hosts: its minimum is {demand.least} and it can have at most {min(num_slots, demand.most)}"
    wanted = f"{demand.least} slots" if demand.least > 1 else "a slot"
    return f"waiting for {wanted}: {others}"


def _names(first: Sequence[str], num: int) -> str:
    """Name the first three of ``num`` jobs."""
    return ", ".join(first[:3]) + (f" and {num - 3} more" if num > 3 else "")
