"""How far the surviving members have come after a loss, which they agree on before they synchronize their state.

Each member sends the next round as it sees it to the first rank of the recovery order, which sends the rounds of all to
each: as many messages as there are members, twice. No two rounds differ by more than one, since a round is committed by
all of its members or needs those that have not committed it; a member that is behind takes the state of one that is
ahead. Pure, as all of this package.
"""

from collections.abc import Iterable

from ..messages import CommittedRound, CommittedRounds, Order
from .events import SendToPeer, SyncState


class RoundAgreement:
    """What a member knows of the others' rounds while it waits for a recovery."""

    def __init__(self) -> None:
        self.round: int | None = None
        """This member's next round; None while it does not wait for a recovery."""
        self._received: dict[int, CommittedRound] = {}
        self._rounds: CommittedRounds | None = None
        self._sent: set[tuple[int, int]] = set()  # peer, generation

    def receive(self, peer: int, message: CommittedRound | CommittedRounds) -> None:
        """Record what ``peer`` sent."""
        known = self._received.get(peer) if isinstance(message, CommittedRound) else self._rounds
        if known is not None and known.generation > message.generation:
            return
        if isinstance(message, CommittedRound):
            self._received[peer] = message
        else:
            self._rounds = message

    def forget(self, peer: int) -> None:
        """The link to ``peer`` is lost: once it is up again, this member sends everything again."""
        self._sent = {item for item in self._sent if item[0] != peer}

    def send(self, order: Order, worker: int, links: set[int]) -> list[SendToPeer]:
        """Send what the linked members of ``order`` are to receive from its member ``worker``, once to each."""
        first = order.workers[0]
        if worker != first:
            if self.round is None:
                return []
            return self._send_once([first], links, CommittedRound(generation=order.generation, round=self.round))
        self._collect(order)
        if self._rounds is None or self._rounds.generation != order.generation:
            return []
        return self._send_once(order.workers[1:], links, self._rounds)

    def _collect(self, order: Order) -> None:
        """As the first rank of ``order``: record the rounds of all members once they are known, and keep to them."""
        if self.round is None or (self._rounds and self._rounds.generation >= order.generation):
            return
        self._received = {
            peer: message for peer, message in self._received.items() if message.generation >= order.generation
        }
        rounds = dict.fromkeys(order.workers[:1], self.round)
        rounds |= {
            peer: message.round for peer, message in self._received.items() if message.generation == order.generation
        }
        if all(worker in rounds for worker in order.workers):
            furthest = max(rounds[worker] for worker in order.workers)
            behind = tuple(worker for worker in order.workers if rounds[worker] < furthest)
            self._rounds = CommittedRounds(generation=order.generation, round=furthest, behind=behind)

    def _send_once(
        self, peers: Iterable[int], links: set[int], message: CommittedRound | CommittedRounds
    ) -> list[SendToPeer]:
        waiting = [peer for peer in peers if peer in links and (peer, message.generation) not in self._sent]
        self._sent = {item for item in self._sent if item[1] == message.generation}
        self._sent.update((peer, message.generation) for peer in waiting)
        return [SendToPeer(peer, message) for peer in waiting]

    def state_sync(self, order: Order) -> SyncState | None:
        """Return the state sync of ``order`` for a member that waits for it; None until the rounds of all are known."""
        if self.round is None or self._rounds is None or self._rounds.generation != order.generation:
            return None
        return SyncState(order, self._rounds.round, self._rounds.behind)
