"""The jobs that share the slots of one class of device, and the policy's last answer about them."""

from collections.abc import Iterable, Mapping, Sequence

from ..policies.demand import Policy, Target
from .host_groups import HostGroups
from .job_rooms import find_rooms
from .job_view import JobView


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
