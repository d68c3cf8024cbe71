"""Which slots each job should have, once it is decided how many.

- A job keeps what it has. It gives up slots on the host where it has fewest, joiners before members, so that whole
  hosts become free.
- It gains slots that are free now before those that are being released, then on hosts where it runs already, then on as
  few others as possible.
- No slot goes to two jobs. The job that may run on the fewest hosts chooses first.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Want:
    """How many slots a job should have, which it has (in rank order), and where it may have others."""

    job: str
    workers: int
    held: tuple[SlotId, ...] = ()
    joining: frozenset[SlotId] = frozenset()
    """Those of ``held`` whose workers do not train yet."""
    hosts: frozenset[str] = frozenset()
    """Where it may start workers."""


def place(wants: Sequence[Want], *, usable: Iterable[SlotId], free: Iterable[SlotId]) -> dict[str, tuple[SlotId, ...]]:
    """Return the slots that each job should have, those it keeps first.

    ``usable`` are all that may be used at all; ``free`` those of them that no worker holds. A job gets fewer than it
    wants when other jobs hold the slots that it may run on.
    """
    usable, free = frozenset(usable), frozenset(free)
    placed = {want.job: _keep(want, usable) for want in wants}
    left = usable.difference(*placed.values())
    offered = _by_host(left & free), _by_host(left - free)
    for want in sorted(wants, key=lambda w: (len(w.hosts), w.job)):
        kept = placed[want.job]
        placed[want.job] = (*kept, *_take(want.workers - len(kept), kept, want.hosts, offered))
    return placed


def _keep(want: Want, usable: frozenset[SlotId]) -> tuple[SlotId, ...]:
    kept = [slot for slot in want.held if slot in usable]
    while len(kept) > want.workers:
        on_host = Counter(slot.host for slot in kept)
        # of equals the last: the highest rank goes first
        kept.remove(min(reversed(kept), key=lambda slot: (slot not in want.joining, on_host[slot.host])))
    return tuple(kept)


def _by_host(slots: Iterable[SlotId]) -> SlotsByHost:
    by_host: SlotsByHost = {}
    for slot in slots:
        by_host.setdefault(slot.host, []).append(slot)
    for of_host in by_host.values():
        of_host.sort()
    return by_host


def _take(
    num: int, kept: Sequence[SlotId], hosts: frozenset[str], offered: tuple[SlotsByHost, SlotsByHost]
) -> list[SlotId]:
    """Take ``num`` slots on ``hosts``, or as many as there are, from ``offered``, the first before the second."""
    taken: list[SlotId] = []
    for by_host in offered:
        while len(taken) < num:
            own = Counter(slot.host for slot in (*kept, *taken) if slot.host in by_host and slot.host in hosts)
            candidates = own or [host for host in by_host if host in hosts]
            if not candidates:
                break
            missing = num - len(taken)
            host = min(candidates, key=lambda h: (-own[h], *_fit(len(by_host[h]), missing), h))
            taken += by_host[host][:missing]
            by_host[host] = by_host[host][missing:]
            if not by_host[host]:
                del by_host[host]
    return taken


def _fit(num: int, missing: int) -> tuple[bool, int]:
    """Order hosts: the smallest that has all that is missing, else the largest."""
    return (num < missing, num if num >= missing else -num)
