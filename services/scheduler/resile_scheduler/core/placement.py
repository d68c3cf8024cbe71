"""Which slots each job should have, once it is decided how many.

- A job keeps what it has. It gives up slots on the host where it has fewest, joiners before members, so that whole
  hosts become free.
- It gains slots that are free now before those that are being released, then on hosts where it runs already, then on as
  few others as possible.
- No slot goes to two jobs. The job that may run on the fewest hosts chooses first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple


class SlotId(NamedTuple):
    """One slot of one host."""

    host: str
    number: int

    @property
    def name(self) -> str:
        """``<host>/<index>``."""
        return f"{self.host}/{self.number}"


SlotsByHost = dict[str, list[SlotId]]


def by_host(slots: Iterable[SlotId]) -> SlotsByHost:
    """Return ``slots`` by host, in order."""
    grouped: SlotsByHost = {}
    for slot in sorted(slots):
        grouped.setdefault(slot.host, []).append(slot)
    return grouped


@dataclass(frozen=True)
class Want:
    """How many slots a job should have, which it has and may keep (in rank order), and where it may have others."""

    job: str
    workers: int
    held: tuple[SlotId, ...] = ()
    joining: frozenset[SlotId] = frozenset()
    """Those of ``held`` whose workers do not train yet."""
    hosts: frozenset[str] = frozenset()
    """Where it may start workers."""


def place(wants: Iterable[Want], *, free: SlotsByHost, released: SlotsByHost) -> dict[str, tuple[SlotId, ...]]:
    """Return the slots that each job should have, those it keeps first.

    Nobody holds the slots that are ``free``; those that are ``released`` are held by workers that leave. Slots that
    neither has belong to other jobs, so a job may get fewer than it wants.
    """
    wants = list(wants)
    placed = {want.job: _keep(want) for want in wants}
    given_up = (slot for want in wants for slot in set(want.held).difference(placed[want.job]))
    offers = _Offer(free), _Offer(by_host((*chain(*released.values()), *given_up)))
    for want in sorted(wants, key=lambda w: (len(w.hosts), w.job)):
        kept = placed[want.job]
        placed[want.job] = (*kept, *_take(want.workers - len(kept), kept, want.hosts, offers))
    return placed


class _Offer:
    """Slots by host, in order; those that are taken are left out."""

    def __init__(self, slots: Mapping[str, Sequence[SlotId]]) -> None:
        self._slots = slots
        self._changed: dict[str, Sequence[SlotId]] = {}
        self.room = {host: len(of_host) for host, of_host in slots.items()}
        """How many slots each host has left; hosts without any are left out."""

    def take(self, host: str, num: int) -> Sequence[SlotId]:
        """Take ``num`` slots of ``host``, or as many as there are."""
        of_host = self._changed[host] if host in self._changed else sorted(self._slots[host])
        self._changed[host] = of_host[num:]
        self.room[host] = len(of_host) - num
        if self.room[host] <= 0:
            del self.room[host]
        return of_host[:num]


def _keep(want: Want) -> tuple[SlotId, ...]:
    kept = list(want.held)
    while len(kept) > want.workers:
        on_host = Counter(slot.host for slot in kept)
        # of equals the last: the highest rank goes first
        kept.remove(min(reversed(kept), key=lambda slot: (slot not in want.joining, on_host[slot.host])))
    return tuple(kept)


def _take(num: int, kept: Sequence[SlotId], hosts: frozenset[str], offers: Iterable[_Offer]) -> list[SlotId]:
    """Take ``num`` slots on ``hosts``, or as many as there are, from ``offers``, the first before the second."""
    taken: list[SlotId] = []
    for offer in offers:
        while len(taken) < num:
            own = Counter(slot.host for slot in (*kept, *taken) if slot.host in offer.room and slot.host in hosts)
            candidates = own or [host for host in offer.room if host in hosts]
            if not candidates:
                break
            missing = num - len(taken)
            host = min(candidates, key=lambda h: (-own[h], *_fit(offer.room[h], missing), h))
            taken += offer.take(host, missing)
    return taken


def _fit(num: int, missing: int) -> tuple[bool, int]:
    """Order hosts: the smallest that has all that is missing, else the largest."""
    return (num < missing, num if num >= missing else -num)
