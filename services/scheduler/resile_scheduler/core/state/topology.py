"""How many slots a job gets on each host that has room.

Hosts say where they are by the labels ``zone`` and ``rack``. The levels are decided from the outside in: first zones,
then racks, then hosts.

- Packed: a job stays where it already has most slots. Elsewhere it takes the place that holds all missing slots on the
  fewest hosts, and of these the smallest; if none holds all, the largest, and so on.
- Spread: a job takes one slot after the other in the place where it has fewest, and of these where most are left.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from resile_shared.messages.hosts import LOCATION_LABELS as LEVELS

Domain = tuple[str, ...]
"""Where a host is, by the values of `LEVELS`: its zone is a prefix of it. Empty for a host without any of them."""
Numbers = Mapping[str, int]
"""Numbers of slots by host."""


def domain_of(labels: Mapping[str, str]) -> Domain:
    """Return where a host is, by its labels; empty: they do not say."""
    domain = tuple(labels.get(level, "") for level in LEVELS)
    return domain if any(domain) else ()


def num_places(hosts: Iterable[str], domains: Mapping[str, Domain]) -> tuple[int, int, int]:
    """Return over how many zones, racks and hosts a job on ``hosts`` is spread."""
    distinct = set(hosts)
    if distinct and not domains:
        return 1, 1, len(distinct)
    zones, racks = ({_at(level, host, domains) for host in distinct} for level in (1, 2))
    return len(zones), len(racks), len(distinct)


def packed(num: int, room: Numbers, own: Numbers, domains: Mapping[str, Domain], level: int = 1) -> dict[str, int]:
    """Return how many slots to take on each host: ``num`` in all, or fewer if there is less ``room``.

    ``own`` are the slots that the job has already. The hosts are in the order in which they were chosen.
    """
    if level > len(LEVELS) or not domains:
        return _packed_on_hosts(num, room, own)
    places: dict[Domain, dict[str, int]] = {}
    for host, left in room.items():
        places.setdefault(_at(level, host, domains), {})[host] = left
    chosen: dict[str, int] = {}
    own_in = _by_domain(own, domains, level)
    while num > 0 and places:
        best = next(iter(places)) if len(places) == 1 else min(places, key=_fit(num, places, own_in))
        found = packed(num, places.pop(best), own, domains, level + 1)
        chosen |= found
        num -= sum(found.values())
    return chosen


def _fit(
    num: int, places: Mapping[Domain, Numbers], own_in: Mapping[Domain, int]
) -> Callable[[Domain], tuple[int, bool, int, int, Domain]]:
    """Return the key by which places are compared that are to hold ``num`` slots."""

    def key(place: Domain) -> tuple[int, bool, int, int, Domain]:
        rooms = sorted(places[place].values(), reverse=True)
        total = sum(rooms)
        if total < num:
            return -own_in.get(place, 0), True, -total, 0, place
        hosts, left = 0, num
        while left > 0:
            left -= rooms[hosts]
            hosts += 1
        return -own_in.get(place, 0), False, hosts, total, place

    return key


def _packed_on_hosts(num: int, room: Numbers, own: Numbers) -> dict[str, int]:
    left = dict(room)
    chosen: dict[str, int] = {}
    while num > 0 and left:
        # The smallest that has all that is missing, else the largest.
        host = min(
            left,
            key=lambda h: (-own.get(h, 0), left[h] < num, left[h] if left[h] >= num else -left[h], h),
        )
        chosen[host] = min(left.pop(host), num)
        num -= chosen[host]
    return chosen


def spread(num: int, room: Numbers, own: Numbers, domains: Mapping[str, Domain]) -> dict[str, int]:
    """Return how many slots to take on each host, as `packed` does, but as evenly as possible."""
    left = dict(room)
    chosen: Counter[str] = Counter()
    held = Counter(own)
    in_domain = Counter(_by_domain(own, domains, 1) | _by_domain(own, domains, 2))

    def key(host: str) -> tuple[int, int, int, int, str]:
        zone, rack = (in_domain[_at(level, host, domains)] for level in (1, 2))
        return zone, rack, held[host], -left[host], host

    while num > 0 and left:
        host = min(left, key=key)
        in_domain.update((_at(1, host, domains), _at(2, host, domains)))
        held[host] += 1
        chosen[host] += 1
        num -= 1
        left[host] -= 1
        if not left[host]:
            del left[host]
    return dict(chosen)


def neighbors(hosts: Sequence[str], domains: Mapping[str, Domain]) -> list[int]:
    """Return the order in which workers on ``hosts`` are neighbors of those on their host, in their rack and zone.

    Workers with neighboring shards add up more of them before anything leaves the host or the rack. Hosts, racks and
    zones come in the order of their first workers, so the first worker stays the first.
    """
    places = [(domains.get(host, ())[:1], domains.get(host, ()), host) for host in hosts]
    first: dict[tuple[int, object], int] = {}
    for number, levels in enumerate(places):
        for level in enumerate(levels):
            first.setdefault(level, number)
    return sorted(range(len(hosts)), key=lambda number: [first[level] for level in enumerate(places[number])])


def _at(level: int, host: str, domains: Mapping[str, Domain]) -> Domain:
    return domains.get(host, ())[:level]


def _by_domain(own: Numbers, domains: Mapping[str, Domain], level: int) -> dict[Domain, int]:
    numbers: dict[Domain, int] = {}
    for host, num in own.items():
        domain = _at(level, host, domains)
        numbers[domain] = numbers.get(domain, 0) + num
    return numbers
