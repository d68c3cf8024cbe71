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


@dataclass(frozen=True)
class Want:
    """How many slots a job should have, which it has (in rank order), and which it may have besides."""

    job: str
    workers: int
    held: tuple[SlotId, ...] = ()
    joining: frozenset[SlotId] = frozenset()
    """Those of ``held`` whose workers do not train yet."""
    eligible: frozenset[SlotId] = frozenset()


def place(wants: Sequence[Want], *, usable: Iterable[SlotId], free: Iterable[SlotId]) -> dict[str, tuple[SlotId, ...]]:
    """Return the slots that each job should have, those it keeps first.

    ``usable`` are all that may be used at all; ``free`` those of them that no worker holds. A job gets fewer than it
    wants when other jobs hold the slots that it may run on.
    """
    usable, free = frozenset(usable), frozenset(free)
    placed = {want.job: _keep(want, usable) for want in wants}
    taken = {slot for slots in placed.values() for slot in slots}
    for want in sorted(wants, key=lambda w: (len(w.eligible), w.job)):
        kept = placed[want.job]
        offered = (want.eligible & usable) - taken
        gained = _choose(want.workers - len(kept), kept, offered, free)
        placed[want.job] = (*kept, *gained)
        taken.update(gained)
    return placed


def _keep(want: Want, usable: frozenset[SlotId]) -> tuple[SlotId, ...]:
    kept = [slot for slot in want.held if slot in usable]
    while len(kept) > want.workers:
        on_host = Counter(slot.host for slot in kept)
        # of equals the last: the highest rank goes first
        kept.remove(min(reversed(kept), key=lambda slot: (slot not in want.joining, on_host[slot.host])))
    return tuple(kept)


def _choose(num: int, kept: Sequence[SlotId], offered: frozenset[SlotId], free: frozenset[SlotId]) -> list[SlotId]:
    chosen: list[SlotId] = []
    for candidates in (offered & free, offered - free):
        if len(chosen) >= num:
            break
        by_host: dict[str, list[SlotId]] = {}
        for slot in sorted(candidates):
            by_host.setdefault(slot.host, []).append(slot)
        while by_host and len(chosen) < num:
            missing = num - len(chosen)
            own = Counter(slot.host for slot in (*kept, *chosen))
            host = min(by_host, key=lambda h: (-own[h], *_fit(len(by_host[h]), missing), h))
            chosen += by_host.pop(host)[:missing]
    return chosen


def _fit(num: int, missing: int) -> tuple[bool, int]:
    """Order hosts: the smallest that has all that is missing, else the largest."""
    return (num < missing, num if num >= missing else -num)
