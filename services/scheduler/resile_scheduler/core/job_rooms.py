"""Which slots jobs may use, for policies: rooms of slots that the same jobs may use.

A job that asks for labels (`resile submit --group`) may use the hosts that have them. A job that is pinned, as gangs
are, can have no other slots than those that it has. A job keeps slots on hosts that its labels do not fit any more, but
gets no others there. Hosts that it avoids for a while, and those that do not have its environment yet, count as if it
could use them: that is over soon, and environments are built where a job has a share.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from ..policies.demand import Room
from .host_groups import HostGroups
from .job_view import JobView

Rooms = tuple[Room, ...] | None
Labels = tuple[str, ...]
"""The labels of a host that jobs ask for: the slots of all hosts with the same ones are one room."""


def find_rooms(views: Sequence[JobView], groups: HostGroups, device_class: str, *, pinned: Set[str]) -> list[Rooms]:
    """Return the rooms of each job; None: it may use all slots. Those that are ``pinned`` keep what they have."""
    everywhere = groups.of_class(device_class).hosts
    asked = {labels: groups.fitting(device_class, labels).hosts for labels in sorted({view.labels for view in views})}
    confining = {labels: hosts for labels, hosts in asked.items() if hosts != everywhere}
    if not confining:
        return [None] * len(views)
    labels_of = {host: tuple(each for each in confining if host in confining[each]) for host in everywhere}
    open_hosts = [frozenset[str]() if view.name in pinned else asked[view.labels] for view in views]
    own = {view.name: _own_slots(view, labels_of, hosts) for view, hosts in zip(views, open_hosts, strict=True)}
    sizes: Counter[Labels] = Counter()
    for host, labels in labels_of.items():
        sizes[labels] += groups.num_slots(host)
    for numbers in own.values():
        sizes.subtract(numbers)
    rooms = [(labels, Room(str(labels), num)) for labels, num in sizes.items()]
    rooms_of = {job: [Room(f"{labels} {job}", num) for labels, num in numbers.items()] for job, numbers in own.items()}
    for job, numbers in own.items():
        rooms += zip(numbers, rooms_of[job], strict=True)
    open_to = {each: {room for labels, room in rooms if each in labels} for each in confining}

    def rooms_for(view: JobView) -> Rooms:
        if view.name in pinned:
            return tuple(sorted(rooms_of[view.name]))
        return tuple(sorted(open_to[view.labels].union(rooms_of[view.name]))) if view.labels in confining else None

    return [rooms_for(view) for view in views]


def _own_slots(view: JobView, labels_of: Mapping[str, Labels], fitting: frozenset[str]) -> Counter[Labels]:
    """Return how many slots a job has that it cannot exchange for others, by the labels of the hosts."""
    own: Counter[Labels] = Counter()
    for host, num in view.on_host.items():
        if host in labels_of and host not in fitting:
            own[labels_of[host]] += num
    return own
