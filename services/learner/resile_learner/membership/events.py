"""The events that a worker's membership handles, and the commands that it returns."""

from dataclasses import dataclass

from ..messages import Member, MembershipMessage, Order, PeerMessage


@dataclass(frozen=True)
class OrderReceived:
    """An order arrived, from the agent or from a peer, perhaps not for the first time."""

    order: Order


@dataclass(frozen=True)
class PauseRequested:
    """The agent asks the members of ``lineage`` to save a checkpoint and stop there."""

    lineage: int


@dataclass(frozen=True)
class LinkUp:
    """Both connections to ``peer`` are established and authenticated."""

    peer: int


@dataclass(frozen=True)
class LinkDown:
    """The connection to ``peer`` is lost."""

    peer: int


@dataclass(frozen=True)
class MessageReceived:
    """``peer`` sent something other than an order."""

    peer: int
    message: MembershipMessage


@dataclass(frozen=True)
class ScriptReady:
    """This worker's script has reached its training call."""


@dataclass(frozen=True)
class RoundCompleted:
    """The headers of all members have arrived; ``named[r]`` is the generation that rank r's header names."""

    named: tuple[int, ...]


@dataclass(frozen=True)
class StateReceived:
    """This joiner holds the full state, and so is a member of ``generation``."""

    generation: int


@dataclass(frozen=True)
class RoundAbandoned:
    """This member's round was abandoned. It has committed all rounds before ``round``; -1: it has no complete state."""

    round: int


@dataclass(frozen=True)
class StateSyncRequested:
    """This member's main thread is free to synchronize the state; the answer, if it can start now, is `SyncState`."""


@dataclass(frozen=True)
class StateSynced:
    """This member has the state with which ``generation``, a recovery, begins: the one before ``round``."""

    generation: int
    round: int


Event = (
    OrderReceived
    | PauseRequested
    | LinkUp
    | LinkDown
    | MessageReceived
    | ScriptReady
    | RoundCompleted
    | StateReceived
    | RoundAbandoned
    | StateSyncRequested
    | StateSynced
)


@dataclass(frozen=True)
class Connect:
    """Connect to ``member`` and prove the secret of ``generation``."""

    member: Member
    generation: int


@dataclass(frozen=True)
class SendToPeer:
    """Send ``message`` to ``peer``, unless it has disconnected."""

    peer: int
    message: PeerMessage


@dataclass(frozen=True)
class AbandonRound:
    """Abandon the round of ``generation`` that is open, or else the next one: ``lost`` takes no part in it any more."""

    lost: int
    generation: int


@dataclass(frozen=True)
class Switch:
    """Make ``new`` the current generation from the next round on; ``old`` was it until now."""

    old: Order
    new: Order

    @property
    def continuing(self) -> tuple[int, ...]:
        """Members of both, in the old rank order."""
        return tuple(worker for worker in self.old.workers if worker in self.new.workers)

    @property
    def joiners(self) -> tuple[int, ...]:
        """Members of the new generation alone, in rank order."""
        return tuple(worker for worker in self.new.workers if worker not in self.old.workers)

    @property
    def leavers(self) -> tuple[int, ...]:
        """Members of the old generation alone, in rank order."""
        return tuple(worker for worker in self.old.workers if worker not in self.new.workers)

    def receivers_of(self, donor: int) -> tuple[int, ...]:
        """The joiners that get the full state from ``donor``; leavers give it only if nobody continues."""
        donors = self.continuing or self.old.workers
        return tuple(joiner for k, joiner in enumerate(self.joiners) if donors[k % len(donors)] == donor)


@dataclass(frozen=True)
class SyncState:
    """Synchronize the state with the members of ``order``, a recovery, and post how it ended.

    ``round`` is the next round of those that are furthest ahead, -1 if no member has the complete state; ``behind`` are
    the others, in rank order.
    """

    order: Order
    round: int
    behind: tuple[int, ...] = ()

    @property
    def donors(self) -> tuple[int, ...]:
        """The members that are furthest ahead, in rank order."""
        behind = frozenset(self.behind)
        return tuple(worker for worker in self.order.workers if worker not in behind)

    def donor_of(self, receiver: int) -> int | None:
        """The member that gives ``receiver`` its state; None for one that has it."""
        donors = self.donors
        return donors[self.behind.index(receiver) % len(donors)] if receiver in self.behind else None

    def receivers_of(self, donor: int) -> tuple[int, ...]:
        """The members that get the state of ``donor``."""
        return tuple(worker for worker in self.behind if self.donor_of(worker) == donor)


@dataclass(frozen=True)
class Withdraw:
    """Exit: this worker is not needed any more and can never become a member again."""


MainThreadCommand = Switch | SyncState
Command = Connect | SendToPeer | AbandonRound | Withdraw | MainThreadCommand
