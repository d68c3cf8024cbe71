"""How the members that are left become level after a loss: what they tell each other, and who gives its state to whom.

All members tell the others the next round as they see it. No two differ by more than one, since a round is committed by
all of its members or needs those that have not; who is behind takes the state of one that is ahead. Pure, like
`membership.py`, of which this is a part.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .messages import Order


@dataclass(frozen=True)
class RoundLost:
    """This member's round was abandoned. All rounds before ``round`` are committed here; -1: its state is torn."""

    round: int


@dataclass(frozen=True)
class StandingTold:
    """``peer``, a member too, has come to ``round``, as ``generation`` begins with a recovery."""

    peer: int
    generation: int
    round: int


@dataclass(frozen=True)
class Levelling:
    """This member begins to become level with the others: what it told them of itself may be true no more."""


@dataclass(frozen=True)
class Levelled:
    """This member has the state with which ``generation``, which recovers, begins: that before ``round``."""

    generation: int
    round: int


@dataclass(frozen=True)
class TellStanding:
    """Tell ``peer`` to which round this member has come, as ``generation`` begins with a recovery."""

    peer: int
    generation: int
    round: int


@dataclass(frozen=True)
class LeaveRound:
    """Abandon the round of ``generation`` that is under way, or else the next: ``lost`` has no part in it any more."""

    lost: int
    generation: int


@dataclass(frozen=True)
class Recovery:
    """How the generation of ``order`` begins: ``standings`` has the round that each of its members has come to."""

    order: Order
    standings: Mapping[int, int]

    @property
    def donors(self) -> tuple[int, ...]:
        """The members that have come furthest, in rank order."""
        furthest = max(self.standings.values())
        return tuple(worker for worker in self.order.workers if self.standings[worker] == furthest)

    def donor_of(self, receiver: int) -> int | None:
        """Who gives ``receiver`` its state; None for one that has it."""
        donors = self.donors
        behind = [worker for worker in self.order.workers if worker not in donors]
        return donors[behind.index(receiver) % len(donors)] if receiver in behind else None

    def receivers_of(self, donor: int) -> tuple[int, ...]:
        """The members that get the state of ``donor``."""
        return tuple(worker for worker in self.order.workers if self.donor_of(worker) == donor)


class Standings:
    """What a member knows of how far the members have come, while it waits for a generation that recovers."""

    def __init__(self) -> None:
        self.round: int | None = None
        """To which this member has come; None while it does not wait."""
        self._told_by: dict[tuple[int, int], int] = {}
        self._told_to: set[tuple[int, int]] = set()

    def hear(self, told: StandingTold) -> None:
        """Take in what a peer tells."""
        self._told_by[told.peer, told.generation] = told.round

    def forget(self, peer: int) -> None:
        """The link to ``peer`` is gone: it has to be told anew."""
        self._told_to = {item for item in self._told_to if item[0] != peer}

    def tell(self, order: Order, links: set[int]) -> list[TellStanding]:
        """Tell the linked members of ``order``, each once."""
        number, generation = self.round, order.generation
        if number is None:
            return []
        waiting = [p for p in order.workers if p in links and (p, generation) not in self._told_to]
        self._told_to.update((peer, generation) for peer in waiting)
        return [TellStanding(peer, generation, number) for peer in waiting]

    def recovery(self, order: Order, worker: int) -> Recovery | None:
        """Return how ``order`` begins, as seen by its member ``worker``; None until all others have told."""
        if self.round is None:
            return None
        told = {peer: self._told_by.get((peer, order.generation)) for peer in order.workers if peer != worker}
        standings = {peer: number for peer, number in told.items() if number is not None}
        return Recovery(order, standings | {worker: self.round}) if len(standings) == len(told) else None
