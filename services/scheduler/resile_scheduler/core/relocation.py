"""Decides which job moves to free slots so that a job confined to other hosts can take the slots it leaves.

A job whose labels fit few hosts lacks its share of slots as long as other jobs are there that could run elsewhere. One
of these moves. If none of them can use the free slots, a job moves that is where they could run: they follow later.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from .slots import SlotId
from .topology import Domain, packed, spread

Slots = tuple[SlotId, ...]


class Mover(NamedTuple):
    """A job that may move: its slots in rank order, and the hosts on which it may start workers."""

    slots: Slots
    least: int
    """The fewest workers that stay, unless all are replaced at once."""
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
    """Return a job, and the slots that it should have instead of its own, so that it leaves up to ``num`` of ``hosts``.

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
    """Return the jobs on ``hosts`` that could also run elsewhere."""
    some = (name for name, mover in movers.items() if any(slot.host in hosts for slot in mover.slots))
    return [name for name in some if not movers[name].hosts <= hosts]


def _moved(
    mover: Mover,
    hosts: frozenset[str],
    num: int,
    free: Mapping[str, Sequence[SlotId]],
    domains: Mapping[str, Domain],
) -> Slots:
    """Return the slots of ``mover`` after it has left up to ``num`` slots of ``hosts``; empty: it can leave none."""
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
