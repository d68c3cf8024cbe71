"""The jobs that share the slots of one class of device, which of these each may use, and the policy's last answer.

Slots that the same jobs may use are a room. A job that asks for labels (`resile submit --group`) may use the hosts that
have them. A job that is pinned, as gangs are, can have no other slots than those that it has. A job keeps slots on
hosts that its labels do not fit any more, but gets no others there. Hosts that it avoids for a while, and those that
do not have its environment yet, count as if it could use them: that is over soon, and environments are built where a
job has a share.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from ...policies.demand import Policy, Room, Target
from .host_groups import HostGroups
from .job_view import JobView

Rooms = tuple[Room, ...] | None
Labels = tuple[str, ...]
"""The labels of a host that jobs ask for: the slots of all hosts with the same ones are one room."""


class Sharing:
    """Jobs that share slots, in the order of their submissions. The policy is asked again when its input differs."""

    def __init__(self, views: Sequence[JobView]) -> None:
        self.views = views
        self._places = {view.name: place for place, view in enumerate(views)}
        self.is_grouped = any(view.labels for view in views)
        """Whether some of the jobs ask for labels."""
        self.is_confined = False
        """Whether some of the jobs may not use all slots."""
        if not self.is_grouped:
            for view in views:
                view.confine(None)
        self._demands = [view.demand for view in views]
        self._asked: tuple[Policy, int] | None = None
        self._targets: Mapping[str, Target] = {}

    def confine(self, groups: HostGroups, device_class: str, *, now: float) -> None:
        """Find which slots each job may use now. If none asks for labels, each may use all."""
        if not self.is_grouped:
            return
        pinned = {view.name for view in self.views if view.is_pinned(now=now)}
        found = find_rooms(self.views, groups, device_class, pinned=pinned)
        self.is_confined = any(rooms is not None for rooms in found)
        for view, rooms in zip(self.views, found, strict=True):
            view.confine(rooms)
            self.refresh(view)

    def refresh(self, view: JobView) -> None:
        """Take over what ``view`` demands now."""
        place = self._places.get(view.name)
        if place is None or self._demands[place] is view.demand:
            return
        if self._demands[place] != view.demand:
            self._asked = None
        self._demands[place] = view.demand

    def targets(self, policy: Policy, num_slots: int) -> tuple[Mapping[str, Target], bool]:
        """Return what ``policy`` gives to the jobs, and whether it was asked again."""
        if self._asked == (policy, num_slots):
            return self._targets, False
        self._targets = policy(self._demands, num_slots)
        self._asked = policy, num_slots
        return self._targets, True

    def among(self, names: Iterable[str]) -> list[JobView]:
        """Return the jobs that ``names`` contains, in order."""
        return [self.views[place] for place in sorted(self._places[name] for name in names if name in self._places)]


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
