"""Which members of a job suspect which, and which of them are evicted.

A worker names a suspect, and does so again and again while it waits. That is an accusation, not a failure:

- A broken link alone is not enough, unless suspect and accuser accuse each other, or the accusation lasts. Silence is
  enough, but the others get a moment to report it too.
- The members that are accused and accuse nobody are evicted, as they are frozen or stuck. Of the others the
  largest set of members goes on in which no member accuses another.
- A worker that another member told of a loss accuses too (hearsay). That is a reason to probe, and no more.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from resile_shared.messages.reports import Evidence

MAX_EXACT = 20
"""The largest connected set is found exactly among up to this many connected workers."""
Pair = tuple[int, int]
"""Two workers: accuser and suspect."""


@dataclass
class Accusation:
    """One worker suspects another: since when, and when it said so last."""

    since: float
    latest: float = float("-inf")
    evidence: Evidence = "broken link"


@dataclass(frozen=True)
class Verdict:
    """Workers to be evicted: those that are mute, and those that a broken network cuts off from the others."""

    mute: frozenset[int]
    cut_off: frozenset[int]


class SuspicionTracker:
    """The accusations within one job. Members repeat them, also to the next scheduler."""

    def __init__(self) -> None:
        self._accusations: dict[Pair, Accusation] = {}
        self.vanished = ""
        """The reason shown for lost members that this scheduler never saw; empty: there are none."""

    @property
    def pairs(self) -> Iterable[Pair]:
        """Who accuses whom."""
        return self._accusations.keys()

    @property
    def suspects(self) -> set[int]:
        """All workers that are accused."""
        return {suspect for _, suspect in self._accusations}

    @property
    def has_silence(self) -> bool:
        """Whether a member is accused of silence."""
        return any(accusation.evidence == "silence" for accusation in self._accusations.values())

    @property
    def is_conclusive(self) -> bool:
        """Whether a worker is evicted even if the suspect's agent answers."""
        pairs = self._accusations.keys()
        return self.has_silence or any((suspect, accuser) in pairs for accuser, suspect in pairs)

    def add(self, pair: Pair, evidence: Evidence, *, now: float, seconds: float) -> bool:
        """Record an accusation; return whether it has lasted ``seconds``. One not repeated for that long is new."""
        accusation = self._accusations.get(pair)
        if accusation is None or now - accusation.latest >= seconds:
            accusation = self._accusations[pair] = Accusation(now)
        accusation.latest = max(accusation.latest, now)
        accusation.evidence = evidence
        return accusation.latest - accusation.since >= seconds

    def have_lasted(self, seconds: float) -> bool:
        """Whether a worker has accused another again and again for ``seconds``."""
        return any(accusation.latest - accusation.since >= seconds for accusation in self._accusations.values())

    def judge(self, members: Set[int], *, now: float, seconds: float) -> Verdict:
        """Decide which workers are evicted, by what living ``members`` said in the last ``seconds``."""
        fresh = {
            pair
            for pair, accusation in self._accusations.items()
            if now - accusation.latest < seconds and accusation.evidence != "hearsay"
        }
        accusers, suspects = (frozenset(pair[side] for pair in fresh) for side in (0, 1))
        return Verdict(suspects - accusers, accusers - largest_connected_set(accusers & members, fresh))

    def record_vanished(self, who: str) -> None:
        """Record that members that this scheduler never saw are lost."""
        self.vanished = f"{who} disappeared without a report"

    def drop_accusations(self) -> None:
        """Forget all accusations: they were made in an earlier generation, or are answered."""
        self._accusations.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._accusations.clear()
        self.vanished = ""


def largest_connected_set(workers: frozenset[int], divided: Set[Pair]) -> frozenset[int]:
    """Return the largest subset of ``workers`` without a pair of ``divided``; of equals the one with the lowest ids.

    This is the maximum independent set of a graph, which no fast algorithm is known for: among more than ``MAX_EXACT``
    workers that pairs connect, the result is one to which no worker can be added, and may not be the largest.
    """
    opponents: dict[int, set[int]] = {number: set() for number in workers}
    for one, other in divided:
        if one in workers and other in workers:
            opponents[one].add(other)
            opponents[other].add(one)
    return _choose(workers, opponents)


def _choose(workers: Set[int], opponents: Mapping[int, Set[int]]) -> frozenset[int]:
    """Choose within each connected component on its own: they do not affect each other."""
    chosen: set[int] = set()
    for component in _components(workers, opponents):
        choose = _choose_exactly if len(component) <= MAX_EXACT else _choose_greedily
        chosen |= choose(component, opponents)
    return frozenset(chosen)


def _components(workers: Set[int], opponents: Mapping[int, Set[int]]) -> list[set[int]]:
    components = []
    left = set(workers)
    while left:
        component: set[int] = set()
        found = {left.pop()}
        while found:
            component |= found
            found = {other for number in found for other in opponents[number] if other in left}
            left -= found
        components.append(component)
    return components


def _choose_exactly(component: Set[int], opponents: Mapping[int, Set[int]]) -> frozenset[int]:
    """Try it with and without the worker that has the most opponents."""
    if len(component) == 1:
        return frozenset(component)
    most = max(component, key=lambda number: (len(opponents[number] & component), number))
    without = _choose(component - {most}, opponents)
    along = _choose(component - opponents[most] - {most}, opponents) | {most}
    return min(without, along, key=lambda chosen: (-len(chosen), sorted(chosen)))


def _choose_greedily(component: Set[int], opponents: Mapping[int, Set[int]]) -> frozenset[int]:
    """Keep the worker that has the fewest opponents left, drop those, and so on."""
    chosen = set()
    left = {number: set(opponents[number] & component) for number in component}
    while left:
        fewest = min(left, key=lambda number: (len(left[number]), number))
        chosen.add(fewest)
        for dropped in (left[fewest] & left.keys()) | {fewest}:
            for other in left.pop(dropped) & left.keys():
                left[other].discard(dropped)
    return frozenset(chosen)
