"""Which job moves to free slots, so that another one, which cannot use these, gets those that it leaves.

A job whose labels fit few hosts lacks slots that are its share, as long as others are there that could as well be
elsewhere. One of these moves. If free slots are of no use to any of them, one moves that is where they could be: they
follow later.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from .placement import SlotId
from .topology import Domain, packed, spread

Slots = tuple[SlotId, ...]


class Mover(NamedTuple):
    """A job that may move: its slots in rank order, and the hosts on which it may start workers."""

    slots: Slots
    least: int
    """So many workers stay, unless all are replaced at once."""
    hosts: frozenset[str]
    is_spread: bool = False


def make_room(
    hosts: frozenset[str],
    num: int,
    movers: Mapping[str, Mover],
    *,
    free: Mapping[str, Sequence[SlotId]],
    domains: Mapping[str, Domain],
) -> dict[str, Slots]:
    """Return a job, and the slots that it should have instead of its own, so that up to ``num`` of ``hosts`` are left.

    Empty: there is no such job.
    """
    while True:
        there = [name for name in sorted(movers) if any(slot.host in hosts for slot in movers[name].slots)]
        for name in there:
            if slots := _moved(movers[name], hosts, num, free, domains):
                return {name: slots}
        wider = hosts.union(*(movers[name].hosts for name in there))
        if wider == hosts:
            return {}
        hosts = wider


def may_stay(hosts: frozenset[str], movers: Mapping[str, Mover]) -> list[str]:
    """Return those on ``hosts`` that could as well be elsewhere."""
    some = (name for name, mover in movers.items() if any(slot.host in hosts for slot in mover.slots))
    return [name for name in some if not movers[name].hosts <= hosts]


def _moved(
    mover: Mover,
    hosts: frozenset[str],
    num: int,
    free: Mapping[str, Sequence[SlotId]],
    domains: Mapping[str, Domain],
) -> Slots:
    """Return the slots of ``mover`` after it has left up to ``num`` of ``hosts``; empty: it can leave none."""
    there = [slot for slot in mover.slots if slot.host in hosts]
    room = {host: len(of_host) for host, of_host in free.items() if host in mover.hosts and host not in hosts}
    wanted = min(num, len(there))
    leaving = max(min(wanted, sum(room.values()), len(mover.slots) - mover.least), 0)
    if leaving < wanted and len(there) == len(mover.slots) <= sum(room.values()):
        leaving = len(there)
    if not leaving:
        return ()
    left = there[-leaving:]
    kept = tuple(slot for slot in mover.slots if slot not in left)
    choose = spread if mover.is_spread else packed
    chosen = choose(leaving, room, Counter(slot.host for slot in kept), domains)
    return (*kept, *chain.from_iterable(sorted(free[host])[:number] for host, number in chosen.items()))
