"""The jobs that share the slots of one class of device, and what the policy answered about them last."""

from collections.abc import Iterable, Mapping, Sequence

from ..policies.demand import Policy, Target
from .job_view import JobView


class Sharing:
    """Jobs that share slots, in the order of their submissions. The policy is asked again when its input differs."""

    def __init__(self, views: Sequence[JobView]) -> None:
        self.views = views
        self._places = {view.name: place for place, view in enumerate(views)}
        self._demands = [view.demand for view in views]
        self._asked: tuple[Policy, int] | None = None
        self._targets: Mapping[str, Target] = {}

    def refresh(self, view: JobView) -> None:
        """See what ``view`` demands now."""
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
        """Return those of the jobs that ``names`` has, in order."""
        return [self.views[place] for place in sorted(self._places[name] for name in names if name in self._places)]
