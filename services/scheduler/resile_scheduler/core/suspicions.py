"""Which members of a job suspect which, and which of them are to be left behind.

A worker names a suspect, and does so again and again while it waits. That is an accusation, not a failure:

- A broken link alone is not enough, unless suspect and accuser accuse each other, or the accusation lasts. Silence is
  enough, but the others get a moment to report it too.
- The members that are accused and accuse nobody are left behind, as they are frozen or stuck. Of the others the
  largest set of members goes on in which no member accuses another.
- A worker that another member told of a loss accuses too (hearsay). That is a reason to probe, and no more.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from resile_shared.messages.reports import Evidence

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
    """Workers to be left behind: those that are mute, and those that a broken network cuts off from the others."""

    mute: frozenset[int]
    cut_off: frozenset[int]


class SuspicionTracker:
    """The accusations within one job. Members repeat them, also to the next scheduler."""

    def __init__(self) -> None:
        self._accusations: dict[Pair, Accusation] = {}
        self.vanished = ""
        """That a worker is lost of which nothing is known but the accusations of its peers."""

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
        """Whether a worker is to be left behind though the suspect's agent answers."""
        pairs = self._accusations.keys()
        return self.has_silence or any((suspect, accuser) in pairs for accuser, suspect in pairs)

    def add(self, pair: Pair, evidence: Evidence, *, now: float, seconds: float) -> bool:
        """Record an accusation; return whether it has lasted ``seconds``. One that was not repeated so long is new."""
        accusation = self._accusations.get(pair)
        if accusation is None or now - accusation.latest >= seconds:
            accusation = self._accusations[pair] = Accusation(now)
        accusation.latest = max(accusation.latest, now)
        accusation.evidence = evidence
        return accusation.latest - accusation.since >= seconds

    def judge(self, members: Set[int], *, now: float, seconds: float) -> Verdict:
        """Decide which workers are left behind, by what living ``members`` said in the last ``seconds``."""
        fresh = {
            pair
            for pair, accusation in self._accusations.items()
            if now - accusation.latest < seconds and accusation.evidence != "hearsay"
        }
        accusers, suspects = (frozenset(pair[side] for pair in fresh) for side in (0, 1))
        return Verdict(suspects - accusers, accusers - largest_connected_set(accusers & members, fresh))

    def record_vanished(self, worker: int) -> None:
        """Record that ``worker``, which this scheduler never saw, is lost."""
        self.vanished = f"worker {worker} disappeared without a report"

    def drop_accusations(self) -> None:
        """Forget all accusations: they were made in an earlier generation, or are answered."""
        self._accusations.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._accusations.clear()
        self.vanished = ""


def largest_connected_set(workers: frozenset[int], divided: Set[Pair]) -> frozenset[int]:
    """Return the largest subset of ``workers`` without a pair of ``divided``; of equals the one with the lowest ids."""
    within = {pair for pair in divided if workers.issuperset(pair)}
    if not within:
        return workers
    count = Counter(number for pair in within for number in pair)
    worst = min(count, key=lambda number: (-count[number], -number))
    opposite = {number for pair in within if worst in pair for number in pair} - {worst}
    return min(
        largest_connected_set(workers - {worst}, within),
        largest_connected_set(workers - opposite, within),
        key=lambda kept: (-len(kept), sorted(kept)),
    )
