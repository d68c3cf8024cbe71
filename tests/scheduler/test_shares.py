"""The steps that policies have in common, against plain ones that look at every job for each slot."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import given, settings

from resile_scheduler.policies.demand import Demand
from resile_scheduler.policies.shares import Shares, hand_out, largest_remainder
from resile_shared.messages.jobs import MAX_PRIORITY, MAX_WORKERS

Key = Callable[[Demand, int], tuple[float, ...]]

KEYS: dict[str, Key] = {
    "fewest per priority": lambda d, share: (share / d.priority, -d.priority, d.number),
    "highest priority": lambda d, _: (-d.priority, d.number),
    "order": lambda d, _: (d.number,),
}


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    jobs = []
    for number in range(draw(st.integers(0, 8))):
        shards = draw(st.none() | st.integers(1, 40))
        most = draw(st.integers(1, min(40, shards or 40)))
        priority = draw(st.sampled_from([1, 2, 3, 5000, 10_000, MAX_PRIORITY]) | st.integers(1, MAX_PRIORITY))
        jobs.append(Demand(f"job-{number}", number, priority, draw(st.integers(1, most)), most, shards))
    return jobs


def plain_quotas(admitted: Sequence[Demand], num_slots: int) -> dict[str, Fraction]:
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


def plain_largest_remainder(admitted: Sequence[Demand], num_slots: int) -> Shares:
    quotas = plain_quotas(admitted, num_slots)
    shares = {job: int(quota) for job, quota in quotas.items()}
    left = int(sum(quotas.values())) - sum(shares.values())
    for demand in sorted(admitted, key=lambda d: (shares[d.job] - quotas[d.job], -d.priority, d.number))[:left]:
        shares[demand.job] += 1
    return shares


def plain_next_useful(demand: Demand, share: int) -> int:
    per_worker = [-(-(demand.num_shards or 0) // n) for n in range(1, demand.most + 1)]
    if demand.num_shards is None:
        return share + 1
    faster = [n for n in range(share + 1, demand.most + 1) if per_worker[n - 1] < per_worker[share - 1]]
    return min(faster, default=demand.most + 1)


def plain_hand_out(admitted: Sequence[Demand], shares: Shares, surplus: int, *, key: Key) -> None:
    while surplus:
        able = [d for d in admitted if plain_next_useful(d, shares[d.job]) <= min(d.most, shares[d.job] + surplus)]
        holding = [d for d in admitted if shares[d.job] < d.most]
        if not holding:
            return
        first = min(able or holding, key=lambda d: key(d, shares[d.job]))
        more = plain_next_useful(first, shares[first.job]) - shares[first.job] if able else 1
        shares[first.job] += more
        surplus -= more


@settings(max_examples=300)
@given(jobs=demands(), num_slots=st.integers(0, 200))
def test_quotas_are_rounded_as_by_exact_fractions(jobs: list[Demand], num_slots: int) -> None:
    assert largest_remainder(jobs, num_slots) == plain_largest_remainder(jobs, num_slots)


@settings(max_examples=300)
@given(jobs=demands(), surplus=st.integers(0, 200), order=st.sampled_from(sorted(KEYS)))
def test_each_slot_goes_to_the_first_that_can_use_it(jobs: list[Demand], surplus: int, order: str) -> None:
    shares, expected = ({job.job: job.least for job in jobs} for _ in range(2))
    hand_out(jobs, shares, surplus, key=KEYS[order])
    plain_hand_out(jobs, expected, surplus, key=KEYS[order])
    assert shares == expected


def test_floats_tell_levels_apart() -> None:
    """Two fractions with numerator a and denominators b, d differ by 1 / (a * d) of themselves, or more."""
    assert MAX_WORKERS * MAX_PRIORITY < 2**52
