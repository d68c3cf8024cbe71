"""Which slots each job should have, once it is decided how many.

- A job keeps what it has. If it has too many slots, it first gives up those on hosts to which another job that lacks
  slots is bound, and joiners before members. A packed job then gives up slots in the rack, and on the host, where it
  has fewest, so that whole hosts become free; a spread job where it has most. On a host, it gives up the device that
  it shares with most workers.
- It gains slots that are free now before those that are being released, on hosts that `topology` chooses.
- A packed job that is spread over more zones, racks or hosts than it could be moves, if that takes it to fewer of them
  and the slots are free now: some of its workers, or else all. Each move leaves the pool less scattered, so moves end.
- No slot goes to two jobs. The job that may run on the fewest hosts chooses first.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..state.slot_sets import SlotId, SlotsByHost, by_host, merged
from ..state.topology import Domain, num_places, packed, spread
from .devices import SharedDevices

SEPARATE = SharedDevices()
"""Each slot has a device of its own, or none."""


@dataclass(frozen=True)
class Want:
    """How many slots a job should have, which it has and may keep (in rank order), and where it may have others."""

    job: str
    workers: int
    held: tuple[SlotId, ...] = ()
    joining: frozenset[SlotId] = frozenset()
    """The slots of ``held`` whose workers do not train yet."""
    hosts: frozenset[str] = frozenset()
    """The hosts on which it may start workers."""
    is_spread: bool = False
    """Whether it should be on many hosts, not on few."""
    least_kept: int | None = None
    """The fewest workers that stay if it moves, unless all are replaced at once; None: it does not move."""


def place(
    wants: Iterable[Want],
    *,
    free: SlotsByHost,
    released: SlotsByHost,
    domains: Mapping[str, Domain],
    devices: SharedDevices = SEPARATE,
) -> dict[str, tuple[SlotId, ...]]:
    """Return the slots that each job should have, those it keeps first.

    Nobody holds the slots that are ``free``, in the order in which those of a host should be given; those that are
    ``released`` are held by workers that leave. Slots that neither has belong to other jobs, so a job may get fewer
    than it wants. ``domains``: where hosts are.
    """
    wants = sorted(wants, key=lambda w: (len(w.hosts), w.job))
    lacks = _lacks(wants, chain(*free.values(), *released.values()))
    placed = {want.job: _keep(want, lacks, domains, devices) for want in wants}
    given_up = (slot for want in wants for slot in set(want.held).difference(placed[want.job]))
    offers = _Offer(free), _Offer(merged(released, by_host(given_up)))
    for want in wants:
        placed[want.job] = (*placed[want.job], *_take(want, placed[want.job], offers, domains))
    for want in wants:
        if want.least_kept is not None:
            placed[want.job] = _moved(want, placed[want.job], offers[0], domains)
    return placed


class _Offer:
    """Slots by host, the best first; those that are taken are left out."""

    def __init__(self, slots: Mapping[str, Sequence[SlotId]]) -> None:
        self._slots = slots
        self._changed: dict[str, Sequence[SlotId]] = {}
        self.room = {host: len(of_host) for host, of_host in slots.items()}
        """How many slots each host has left; hosts without any are left out."""

    def take(self, host: str, num: int) -> Sequence[SlotId]:
        """Take ``num`` slots of ``host``, or as many as there are."""
        of_host = self._changed[host] if host in self._changed else self._slots[host]
        self._changed[host] = of_host[num:]
        self.room[host] = len(of_host) - num
        if self.room[host] <= 0:
            del self.room[host]
        return of_host[:num]


@dataclass
class _Lack:
    """How many slots of some hosts a job has to get from other jobs."""

    hosts: frozenset[str]
    num: int


def _lacks(wants: Sequence[Want], unheld: Iterable[SlotId]) -> list[_Lack]:
    """Return what jobs lack, if not all may use the same hosts: only then could others give up the wrong slots."""
    if len({want.hosts for want in wants}) < 2:
        return []
    room, lacks = Counter(slot.host for slot in unheld), []
    for want in wants:
        num = want.workers - len(want.held)
        if num > 0 and (num := num - sum(of_host for host, of_host in room.items() if host in want.hosts)) > 0:
            lacks.append(_Lack(want.hosts, num))
    return lacks


def _keep(
    want: Want, lacks: Sequence[_Lack], domains: Mapping[str, Domain], devices: SharedDevices
) -> tuple[SlotId, ...]:
    kept = list(want.held)
    if len(kept) <= want.workers:
        return want.held
    sign = -1 if want.is_spread else 1
    on_device = devices.num_staying({slot.host for slot in kept})
    while len(kept) > want.workers:
        on_host = Counter(slot.host for slot in kept)
        in_rack = Counter(domains.get(slot.host, ()) for slot in kept)

        def key(slot: SlotId) -> tuple[int, bool, int, int, int]:
            rack, is_member = domains.get(slot.host, ()), slot not in want.joining
            in_places = sign * in_rack[rack], sign * on_host[slot.host]  # noqa: B023
            return _place_of(slot, lacks), is_member, *in_places, -on_device[devices.of(slot)]

        given_up = min(reversed(kept), key=key)  # of equals the last: the highest rank goes first
        kept.remove(given_up)
        on_device[devices.of(given_up)] -= 1
        if (place := _place_of(given_up, lacks)) < len(lacks):
            lacks[place].num -= 1
    return tuple(kept)


def _place_of(slot: SlotId, lacks: Sequence[_Lack]) -> int:
    """Return which of ``lacks``, those of the fewest hosts first, ``slot`` helps with; their number if none."""
    return next((i for i, lack in enumerate(lacks) if lack.num > 0 and slot.host in lack.hosts), len(lacks))


def _take(want: Want, kept: Sequence[SlotId], offers: Iterable[_Offer], domains: Mapping[str, Domain]) -> list[SlotId]:
    """Take what ``want`` is missing from ``offers``, or as much as there is, from the first before the second."""
    taken: list[SlotId] = []
    choose = spread if want.is_spread else packed
    for offer in offers:
        missing = want.workers - len(kept) - len(taken)
        if missing <= 0:
            break
        room = {host: num for host, num in offer.room.items() if host in want.hosts}
        own = Counter(slot.host for slot in (*kept, *taken))
        for host, num in choose(missing, room, own, domains).items():
            taken += offer.take(host, num)
    return taken


def _moved(want: Want, slots: tuple[SlotId, ...], free: _Offer, domains: Mapping[str, Domain]) -> tuple[SlotId, ...]:
    """Return slots in fewer places instead of ``slots``, if there are some; else ``slots``."""
    before = num_places((slot.host for slot in slots), domains)
    if before == (1, 1, 1) or not free.room or len(slots) < want.workers:
        return slots
    own = Counter(slot.host for slot in slots)
    room = Counter({host: num for host, num in free.room.items() if host in want.hosts})
    # First as few as can be leave, then those on the wrong hosts, then all.
    for staying, preferred in ((slots, own), (slots, Counter[str]()), ((), Counter[str]())):
        chosen = packed(len(slots), room + own if staying else room, preferred, domains)
        after = num_places(chosen, domains)
        is_better = after != before and all(more >= less for more, less in zip(before, after, strict=True))
        kept = tuple(slot for host, num in chosen.items() for slot in [s for s in staying if s.host == host][:num])
        is_whole = sum(chosen.values()) == len(slots)
        if is_whole and is_better and _may_leave(want, set(want.held).difference(kept)):
            more = Counter(chosen) - Counter(slot.host for slot in kept)
            return (*kept, *chain.from_iterable(free.take(host, num) for host, num in more.items()))
    return slots


def _may_leave(want: Want, leaving: Collection[SlotId]) -> bool:
    """Whether the job can do without the workers on ``leaving`` until others have taken over."""
    num_kept = len(want.held) - len(leaving)
    return not leaving or num_kept == 0 or (want.least_kept is not None and num_kept >= want.least_kept)
