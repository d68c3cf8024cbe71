"""Jobs that may not use every slot: shares of the slots that each of them can use.

A room is a number of slots that the same jobs may use (`Demand.rooms`). Rooms have no slot in common, and jobs that
have the same rooms are of one kind. Whether the jobs can have some numbers of slots at the same time is a question of
maximum flow, from kinds to rooms.

1. The policy shares all slots as if every job could use each. If that is possible, it is the answer.
2. Otherwise a minimum cut finds the kinds that exceed the slots of their rooms by most. They share these slots among
   themselves, and the other jobs what is left: both by these same steps.
3. What the first ones cannot use, as no minimum fits, is left to the others. If a job does not fit even among these
   first ones, it waits, and all is shared again without it.

This is the decomposition algorithm for resource allocation under submodular constraints (H. Groenevelt, "Two algorithms
for maximizing a separable concave function over a polymatroid feasible region", EJOR 54, 1991). So as far as minimums
and sizes do not matter, the result is that of the policy itself: with `fairshare` max-min fair among jobs with
constraints, as A. Ghodsi et al. define it ("Choosy", EuroSys 2013). The cut is the largest excess, so the present
shares of the other jobs, and their minimums, fit beside it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .demand import Demand, Policy, Room, Target

Kind = tuple[Room, ...]
"""The rooms that the jobs of one kind may use, sorted."""
Loads = Counter[Kind]
"""How many slots the jobs of each kind have."""


def within_rooms(policy: Policy) -> Policy:
    """Return ``policy`` with targets that can all be met by slots that the jobs may use."""

    def decide(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        if not is_confining(demands):
            return policy(demands, num_slots)
        given = _Division(policy, Rooms(demands, num_slots)).share(demands, Loads())
        return {demand.job: given[demand.job] for demand in demands}

    return decide


def is_confining(demands: Iterable[Demand]) -> bool:
    """Whether some job may not use every slot."""
    return any(demand.rooms is not None for demand in demands)


class Rooms:
    """All rooms of jobs, and one more for the slots that only jobs that may use every slot can have."""

    def __init__(self, demands: Iterable[Demand], num_slots: int) -> None:
        named = sorted({room for demand in demands for room in demand.rooms or ()})
        self._all = (*named, Room("", max(num_slots - sum(room.num_slots for room in named), 0)))
        self.num_slots = num_slots

    def kind(self, demand: Demand) -> Kind:
        """Return the rooms that a job may use."""
        return self._all if demand.rooms is None else demand.rooms

    def loads(self, demands: Iterable[Demand], targets: Mapping[str, Target]) -> Loads:
        """Return how many slots the jobs get, by kind."""
        loads = Loads()
        for demand in demands:
            if demand.job in targets:
                loads[self.kind(demand)] += targets[demand.job].workers
        return loads

    def are_scarce(self, demands: Iterable[Demand]) -> bool:
        """Whether not all jobs can have the most that they can use."""
        most = Loads()
        for demand in demands:
            most[self.kind(demand)] += demand.most
        return bool(self.scarce(most))

    def left(self, demands: Iterable[Demand], given: Loads) -> int:
        """Return how many slots the jobs can have together, beside those that are ``given``."""
        flow = _Flow()
        for kind, num in given.items():
            flow.add(kind, num)
        return sum(flow.add(kind, self.num_slots) for kind in dict.fromkeys(map(self.kind, demands)))

    def scarce(self, loads: Loads) -> set[Kind]:
        """Return the kinds that exceed the slots of their rooms by most; none if the slots suffice."""
        flow, scarce = _Flow(), set[Kind]()
        lacking = [kind for kind, num in loads.items() if flow.add(kind, num) < num]
        for kind in lacking:
            scarce.update(flow.reachable(kind))
        return scarce


class _Division:
    """Shares slots by a policy among jobs of several kinds."""

    def __init__(self, policy: Policy, rooms: Rooms) -> None:
        self._policy = policy
        self._rooms = rooms

    def share(self, demands: Sequence[Demand], given: Loads) -> dict[str, Target]:
        """Return the targets of jobs, beside the slots that are ``given`` to others."""
        waiting: dict[str, Target] = {}
        while True:
            targets = self._policy(demands, self._rooms.left(demands, given))
            scarce = self._rooms.scarce(given + self._rooms.loads(demands, targets))
            first = [demand for demand in demands if self._rooms.kind(demand) in scarce]
            if not first or len(first) == len(demands):  # all: the policy gives more than there is
                return {**waiting, **targets}
            inner: dict[str, Target] = {}
            for part in self._parts(first, given):
                inner |= self.share(part, given + self._rooms.loads(first, inner))
            unfit = {job for job, target in inner.items() if not target.workers}
            if not unfit:
                others = [demand for demand in demands if self._rooms.kind(demand) not in scarce]
                return {**waiting, **inner, **self.share(others, given + self._rooms.loads(first, inner))}
            waiting |= {job: inner[job] for job in unfit}
            demands = [demand for demand in demands if demand.job not in unfit]

    def _parts(self, demands: Sequence[Demand], given: Loads) -> list[list[Demand]]:
        """Return ``demands`` in parts, no two of which compete for a slot."""
        groups: list[set[Room]] = []
        for kind in [*given, *map(self._rooms.kind, demands)]:
            touching = [group for group in groups if not group.isdisjoint(kind)]
            groups = [group for group in groups if group.isdisjoint(kind)] + [set(kind).union(*touching)]
        parts = ([demand for demand in demands if self._rooms.kind(demand)[0] in group] for group in groups)
        return [part for part in parts if part]


class _Flow:
    """A flow from kinds to rooms: how many slots of which room each kind has."""

    def __init__(self) -> None:
        self._used: dict[Room, Counter[Kind]] = {}
        self._left: dict[Room, int] = {}

    def add(self, kind: Kind, num: int) -> int:
        """Give ``num`` more slots to a kind, or as many as there are; return how many. Others change rooms for it."""
        missing = num
        for room in kind:
            missing -= self._move([(room, kind)], missing)
        while missing and (path := self._path(kind)):
            missing -= self._move(path, missing)
        return num - missing

    def reachable(self, kind: Kind) -> Iterable[Kind]:
        """Return the kinds that have slots which ``kind`` could have, or could get by others that change rooms."""
        return self._search(kind)[1]

    def _move(self, path: Sequence[tuple[Room, Kind]], most: int) -> int:
        """Let each kind of ``path`` gain slots of its room, and leave as many of the next one; return how many."""
        leaving = [(room, mover) for (room, _), (_, mover) in zip(path[1:], path[:-1], strict=True)]
        first = path[0][0]
        num = min(
            most, self._left.setdefault(first, first.num_slots), *(self._used[room][mover] for room, mover in leaving)
        )
        if num > 0:
            self._left[first] -= num
            for room, mover in path:
                self._used.setdefault(room, Counter())[mover] += num
            for room, mover in leaving:
                self._used[room][mover] -= num
        return max(num, 0)

    def _path(self, kind: Kind) -> list[tuple[Room, Kind]]:
        """Return which kinds move for ``kind``, from a room with slots left to one of its own; empty: none can."""
        reached, entered = self._search(kind)
        free = next((room for room in reached if self._has_left(room)), None)
        path: list[tuple[Room, Kind]] = []
        while free is not None:
            path.append((free, reached[free]))
            free = entered[reached[free]]
        return path

    def _search(self, kind: Kind) -> tuple[dict[Room, Kind], dict[Kind, Room | None]]:
        """Return the rooms that ``kind`` can reach, and which kind would gain slots there; and the room it would leave.

        Rooms are looked at up to the first one that has slots left.
        """
        reached: dict[Room, Kind] = {}
        entered: dict[Kind, Room | None] = {kind: None}
        queue = [kind]
        for mover in queue:
            for room in mover:
                if room in reached:
                    continue
                reached[room] = mover
                if self._has_left(room):
                    return reached, entered
                for other, num in self._used.get(room, {}).items():
                    if num and other not in entered:
                        entered[other] = room
                        queue.append(other)
        return reached, entered

    def _has_left(self, room: Room) -> bool:
        return self._left.get(room, room.num_slots) > 0
