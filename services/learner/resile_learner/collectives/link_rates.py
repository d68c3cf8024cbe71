"""What follows from the rates of links: which ranks own blocks, whether racks count, and which buckets are grouped.

All decisions are functions of the statuses of a round, or of values derived from them, so all members decide alike.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import median_high, median_low

from .blocks import DIRECT_BYTES, MIN_SHARED_BYTES, Ranks
from .status import Host, Status
from .transport import Traffic

HOP_SECONDS = 0.004
"""Seconds that two more hops inside a host may take: a bucket for which the link takes longer is folded by group."""
MEASURED_BYTES = 4 << 20
"""Bytes that a member sends to other hosts before it knows the rate of its links."""
SLOW_PART = 3
"""A host is slow if its links carry less than 1/SLOW_PART of what those of the median host do: see `choose_owners`."""
SLOW_BETWEEN_RACKS = 2
"""Racks count if links between them carry at most 1/SLOW_BETWEEN_RACKS of what others do: see `choose_racks`."""


def rate_of(
    traffic: Mapping[int, Traffic],
    earlier: Mapping[int, Traffic],
    workers: Collection[int],
    least: int = MEASURED_BYTES,
) -> int:
    """The bytes per second that the links to ``workers`` carry together; 0 before ``least`` bytes were sent."""
    sent = [(traffic[worker], earlier.get(worker, Traffic())) for worker in workers if worker in traffic]
    num_bytes = sum(now.num_bytes - before.num_bytes for now, before in sent)
    return sum(now.rate_since(before) for now, before in sent) if num_bytes >= least else 0


def host_rates(statuses: Sequence[Status]) -> dict[Host, int]:
    """The bytes per second that the links of each host carry; empty until all members have measured, and on one host.

    The median of a host's members counts, since a measurement may be far off.
    """
    rates: dict[Host, list[int]] = {}
    for status in statuses:
        rates.setdefault(status.host, []).append(status.rate + status.far_rate)
    if len(rates) == 1 or not all(map(all, rates.values())):
        return {}
    return {host: len(of_host) * median_low(of_host) for host, of_host in rates.items()}


def choose_owners(statuses: Sequence[Status], rates: Mapping[Host, int]) -> tuple[int, ...]:
    """The ranks that own blocks: those on hosts that are not slow; empty if none is, or if it makes no difference.

    With N hosts, a host that owns the fraction f of a bucket sends and receives 1 + f (N - 2) times its size, so at
    least 1. If M other hosts own all of it, each moves 1 + (N - 2) / M times its size, less than 3 times, since at most
    half of the hosts are slower than the median. A host whose links carry less than a third of theirs takes longer to
    move 1 than they take to move that.
    """
    if len(rates) < 3:
        return ()
    slow = {host for host, rate in rates.items() if rate * SLOW_PART < median_high(rates.values())}
    return tuple(rank for rank, status in enumerate(statuses) if status.host not in slow) if slow else ()


def choose_racks(statuses: Sequence[Status], groups: tuple[Ranks, ...]) -> tuple[Ranks, ...]:
    """The ranks by rack, if the links between racks are slow; else empty. A group is in the rack of its first rank.

    Each of two racks of H hosts sends the other H times the size of a bucket if racks do not count, and once if they
    do. A host sends and receives 2 - 1 / H times the size in either case. If the host is the bottleneck, all its links
    carry about the same, so racks make a difference only where the links to other racks carry less.
    """
    rack_of = [status.rack for status in statuses]
    for group in groups:
        for rank in group:
            rack_of[rank] = rack_of[group[0]]
    near, far = [], []
    for status, rack in zip(statuses, rack_of, strict=True):
        num_far = sum(other != rack for other in rack_of)
        num_near = len(statuses) - num_far - sum(other.host == status.host for other in statuses)
        if num_near > 0 and num_far:
            near.append(status.rate // num_near)
            far.append(status.far_rate // num_far)
    if not near or not all(near) or not all(far) or median_low(far) * SLOW_BETWEEN_RACKS > median_low(near):
        return ()
    return tuple(tuple(rank for rank, of in enumerate(rack_of) if of == rack) for rack in dict.fromkeys(rack_of))


def smallest_grouped(slowest: int) -> int:
    """The smallest bucket to fold by group, in bytes: what the slowest links carry in ``HOP_SECONDS``, in limits."""
    return max(DIRECT_BYTES, min(MIN_SHARED_BYTES, int(slowest * HOP_SECONDS))) if slowest else MIN_SHARED_BYTES


def rate_text(bytes_per_second: int) -> str:
    """Format a rate as text."""
    megabits = bytes_per_second * 8 / 1e6
    return f"{megabits:.2g} Mbit/s" if megabits < 1000 else f"{megabits / 1000:.2g} Gbit/s"
