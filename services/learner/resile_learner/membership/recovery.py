"""How far the surviving members have come after a loss, as they tell each other before they synchronize their state.

Each member sends the others the next round as it sees it. No two differ by more than one, since a round is committed by
all of its members or needs those that have not committed it; a member that is behind takes the state of one that is
ahead. Pure, as all of this package.
"""

from ..messages import CommittedRound, Order
from .events import SendToPeer, SyncState


class RecoveryProgress:
    """What a member knows of the others' rounds while it waits for a recovery."""

    def __init__(self) -> None:
        self.round: int | None = None
        """This member's next round; None while it does not wait."""
        self._received: dict[tuple[int, int], int] = {}
        self._sent: set[tuple[int, int]] = set()

    def receive(self, peer: int, committed: CommittedRound) -> None:
        """Record the round that ``peer`` sent."""
        self._received[peer, committed.generation] = committed.round

    def forget(self, peer: int) -> None:
        """The link to ``peer`` is lost: once it is up again, this member sends its round again."""
        self._sent = {item for item in self._sent if item[0] != peer}

    def send(self, order: Order, links: set[int]) -> list[SendToPeer]:
        """Send this member's round to the linked members of ``order``, once to each."""
        if self.round is None:
            return []
        message = CommittedRound(generation=order.generation, round=self.round)
        waiting = [peer for peer in order.workers if peer in links and (peer, order.generation) not in self._sent]
        self._sent.update((peer, order.generation) for peer in waiting)
        return [SendToPeer(peer, message) for peer in waiting]

    def state_sync(self, order: Order, worker: int) -> SyncState | None:
        """Return the state sync of ``order`` for its member ``worker``; None until all others have sent theirs."""
        if self.round is None:
            return None
        others = {peer: self._received.get((peer, order.generation)) for peer in order.workers if peer != worker}
        rounds = {peer: number for peer, number in others.items() if number is not None}
        return SyncState(order, rounds | {worker: self.round}) if len(rounds) == len(others) else None
