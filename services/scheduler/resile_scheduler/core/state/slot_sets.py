"""Slots, and sets of them by host."""

from collections.abc import Iterable, Set
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


def merged(slots: SlotsByHost, more: SlotsByHost) -> SlotsByHost:
    """Return both, each slot once."""
    return {**slots, **{host: sorted({*slots.get(host, ()), *of_host}) for host, of_host in more.items()}}


def without(slots: SlotsByHost, some: Set[SlotId]) -> SlotsByHost:
    """Return ``slots`` less ``some``."""
    left = dict(slots)
    for host in {slot.host for slot in some}.intersection(slots):
        left[host] = [slot for slot in slots[host] if slot not in some]
        if not left[host]:
            del left[host]
    return left
