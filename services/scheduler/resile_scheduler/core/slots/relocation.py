"""Finds the slots to which jobs can move for the sake of others, or of fewer hosts.

- A job that is spread over more hosts than it needs exchanges slots with others, to be on one host fewer. It leaves
  one of its hosts for another of them. The free slots there are not enough, so jobs that have workers there take the
  slots that it leaves. No job is on more hosts than before, so exchanges come to an end.
- A job whose labels fit few hosts lacks its share of slots as long as other jobs are there that could run elsewhere.
  One of these moves to free slots. If none of them can use these, a job moves that is where they could run: they
  follow later.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ..state.slot_sets import SlotId
from ..state.topology import Domain, num_places, packed, spread

Slots = tuple[SlotId, ...]
MayUse = Callable[[str, str], bool]
"""Returns, for a job and a host, whether the job may start workers there."""


class Holder(NamedTuple):
    """What a job holds, in rank order, and the fewest workers that it keeps unless all are replaced at once."""

    slots: Slots
    least: int

    def on(self, host: str) -> list[SlotId]:
        """Return its slots on one host."""
        return [slot for slot in self.slots if slot.host == host]

    def may_leave(self, host: str) -> bool:
        """Whether it can do without its workers there until others have taken over."""
        num_kept = len(self.slots) - len(self.on(host))
        return num_kept == 0 or num_kept >= self.least

    def is_within(self, *hosts: str) -> bool:
        """Whether it is on no other hosts."""
        return all(slot.host in hosts for slot in self.slots)


def exchange(
    job: str,
    holders: Mapping[str, Holder],
    *,
    free: Mapping[str, Sequence[SlotId]],
    may_use: MayUse,
    domains: Mapping[str, Domain],
) -> dict[str, Slots]:
    """Return the slots that ``job`` and others should have instead of those that they have; empty: there are none.

    ``holders`` are the jobs that may move. The host where the job has fewest workers is left for the one where it has
    most, if possible.
    """
    on_host = Counter(slot.host for slot in holders[job].slots)
    for away in sorted(on_host, key=lambda host: (on_host[host], host)):
        for host in sorted(on_host, key=lambda host: (-on_host[host], host)):
            if host != away and may_use(job, host) and holders[job].may_leave(away):
                found = _leave(away, host, job, holders, free=free.get(host, ()), may_use=may_use)
                if found and all(_is_no_wider(found[name], holders[name].slots, domains) for name in found):
                    return found
    return {}


def _leave(
    away: str, host: str, job: str, holders: Mapping[str, Holder], *, free: Sequence[SlotId], may_use: MayUse
) -> dict[str, Slots]:
    """Return the slots of each job that moves if ``job`` leaves ``away`` for ``host``; empty: too few make room."""
    leaving = sorted(holders[job].on(away))
    missing = len(leaving)
    gained = list(free[:missing])
    moved: dict[str, Slots] = {}
    for name in sorted(holders, key=lambda name: (-len(holders[name].on(host)), name)):
        other, there = holders[name], holders[name].on(host)
        fits = name != job and there and len(gained) + len(there) <= missing
        if fits and other.is_within(host, away) and other.may_leave(host) and may_use(name, away):
            instead, leaving = iter(leaving[: len(there)]), leaving[len(there) :]
            moved[name] = tuple(next(instead) if slot.host == host else slot for slot in other.slots)
            gained += there
    if not moved or len(gained) < missing:
        return {}
    return {job: (*(slot for slot in holders[job].slots if slot.host != away), *gained), **moved}


def _is_no_wider(after: Slots, before: Slots, domains: Mapping[str, Domain]) -> bool:
    numbers = (num_places((slot.host for slot in slots), domains) for slots in (after, before))
    return all(now <= then for now, then in zip(*numbers, strict=True))


class Mover(NamedTuple):
    """A job that may move: its slots in rank order, and the hosts on which it may start workers."""

    slots: Slots
    least: int
    """The fewest workers that stay, unless all are replaced at once."""
    hosts: frozenset[str]
    is_spread: bool = False


def find_room(
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
    return (*kept, *chain.from_iterable(free[host][:number] for host, number in chosen.items()))
