"""The switch of generations, as one worker sees it: a pure state machine.

Events go in through `Membership.handle`, commands come out; the worker's control thread carries them out. The rules:

- An order names a generation newer than all before it. Old orders have no effect. Each worker receives orders from its
  agent. A heartbeat names the newest generation that a peer has the order of: a worker that lacks it requests it.
- A worker that an order drops is never named by a later one, and ids rise with the order that names them first; so
  those who join generation h are the same for everyone.
- A *continuing member* has formed h once it is linked to every member of h and each joiner has sent that it is ready
  for h. A *leaver* has formed h once it has seen the order; where nobody continues, once it is linked to every joiner
  and each has sent that it is ready for h.
- A *joiner* sends that it is ready for h once its script is at the training call and it is linked to every member of h.
  From then on it may become a member of h at any moment, even if it receives a newer order that drops it; it withdraws
  when a member sends that such a generation is active, or when all peers that it sent this to are lost (a leaver that
  hands over stays until its joiner has the state).
- The header of each round names the highest generation its sender has formed. When all headers of one round name the
  same newer generation, and only then, all members switch to it.
- A *leaver* stays until the members that continue have confirmed that they committed its last round; if none of them
  survives to do so, it waits for a recovery order.
- A *recovery order* has no part in this, and until its generation is active nothing else is agreed on. It names workers
  of the generation that is believed to be active: members, leavers that have not left, and joiners that the state was
  not handed to yet. A worker that sees it abandons the open round, if that did not fail by itself. The workers it names
  send their next round to its first rank, and receive the rounds of all from there. Then they synchronize their state
  (a member that is behind takes the state of one that is ahead), and the generation is the current one. The workers it
  drops exit.
"""

from collections.abc import Iterable, Sequence

from resile_shared.recent_events import RecentEvents

from ..messages import (
    ActiveGeneration,
    CommittedRound,
    CommittedRounds,
    Heartbeat,
    JoinerReady,
    MembershipMessage,
    Order,
    OrderRequest,
)
from .events import (
    AbandonRound,
    Command,
    Connect,
    Event,
    LinkDown,
    LinkUp,
    MessageReceived,
    OrderReceived,
    PauseRequested,
    RoundAbandoned,
    RoundCompleted,
    ScriptReady,
    SendToPeer,
    StateReceived,
    StateSynced,
    StateSyncRequested,
    Switch,
    SyncState,
    Withdraw,
)
from .roles import TRANSITIONS, IllegalTransition, Role
from .round_agreement import RoundAgreement
from .view import MembershipView


class Membership:
    """The machine of one worker. ``view`` is what other threads may know of it; each event replaces it."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.view = MembershipView(worker)
        self._role = Role.NEW
        self._current: Order | None = None
        self._successor: Order | None = None  # a leaver's: the generation that follows its last one
        self._orders: dict[int, Order] = {}
        self._links: set[int] = set()
        self._asked: int | None = None  # the peer that is going to send a newer order
        self._is_ready = False
        self._paused_lineage = 0
        self._ready_from: set[tuple[int, int]] = set()  # joiner, generation
        self._ready_to: set[tuple[int, int]] = set()  # peer, generation
        self._progress = RoundAgreement()
        self._recent = RecentEvents(f"membership of worker {worker}")

    def handle(self, event: Event) -> list[Command]:
        """Process ``event``; return the commands to carry out, in order. Raises InternalError."""
        if self._role is Role.WITHDRAWN:
            return []
        with self._recent.handling(event):
            commands = self._handle(event)
            self.view = self._view()
        return commands

    def counts_on(self, peer: int) -> bool:
        """Whether ``peer`` is a member of the current generation or of one that is ordered."""
        orders = (*self._orders.values(), *([self._current] if self._current else ()))
        return any(peer in order.workers for order in orders)

    def _handle(self, event: Event) -> list[Command]:
        match event:
            case OrderReceived(order):
                return self._on_order(order)
            case PauseRequested(lineage):
                self._paused_lineage = max(self._paused_lineage, lineage)
                return []
            case LinkUp(peer):
                return self._on_link_up(peer)
            case LinkDown(peer):
                return self._on_link_down(peer)
            case MessageReceived(peer, message):
                return self._on_message(peer, message)
            case ScriptReady():
                self._is_ready = True
                return self._advance_joining()
            case RoundCompleted(named):
                return self._on_round_completed(named)
            case StateReceived(generation):
                return [*self._become_member(self._orders[generation]), *self._abandon_round()]
            case RoundAbandoned() | StateSyncRequested() | StateSynced():
                return self._on_recovery_step(event)

    def _on_message(self, peer: int, message: MembershipMessage) -> list[Command]:
        match message:
            case Heartbeat(generation=generation):
                return self._on_heartbeat(peer, generation)
            case OrderRequest():
                newest = self._newest if self._orders else self._current
                return [SendToPeer(peer, newest)] if newest else []
            case JoinerReady(generation=generation):
                self._ready_from.add((peer, generation))
            case ActiveGeneration(generation=generation):
                return self._on_active_generation(generation)
            case CommittedRound() | CommittedRounds():
                self._progress.receive(peer, message)
                return self._send_committed_rounds()
        return []

    def _on_heartbeat(self, peer: int, generation: int) -> list[Command]:
        """Ask one peer at a time; if the link to it is lost, the next heartbeat of another leads to a new request."""
        if self._asked is not None or peer not in self._links or generation <= self._newest_generation:
            return []
        self._asked = peer
        return [SendToPeer(peer, OrderRequest())]

    def _on_recovery_step(self, event: RoundAbandoned | StateSyncRequested | StateSynced) -> list[Command]:
        match event:
            case StateSyncRequested():
                sync = self._state_sync()
                if sync is None:
                    return []  # a newer order arrived just now
                self._progress.round = None  # what this member sent to the others may not hold any more
                return [sync]
            case StateSynced(generation) if not self._is_superseded(generation):
                return self._become_member(self._orders[generation])
            case RoundAbandoned(number) | StateSynced(_, number):
                self._progress.round = number
                return self._send_committed_rounds()

    def _view(self) -> MembershipView:
        return MembershipView(
            worker=self.worker,
            role=self._role,
            current=self._current,
            first_order=self._first_order,
            recovery_order=self._recovery_order,
            newest=self._newest_generation,
            can_sync_state=self._state_sync() is not None,
            is_recovery_linked=self._recovery_order is not None and self._is_linked_to(self._recovery_order.workers),
            formed=tuple(order for order in self._orders.values() if self._has_formed(order)),
            ready_for=tuple(order for order in self._orders.values() if self._can_join(order)),
            is_pause_requested=self._is_pause_requested,
        )

    def _state_sync(self) -> SyncState | None:
        """How the newest recovery begins, once all its members are linked and their rounds are known."""
        order = self._recovery_order
        return self._progress.state_sync(order) if order and self._is_linked_to(order.workers) else None

    @property
    def _is_pause_requested(self) -> bool:
        """Whether the request is meant for this worker, and not for the job before its last cold start."""
        order = self._current or self._first_order
        return order is not None and order.lineage == self._paused_lineage

    @property
    def _first_order(self) -> Order | None:
        mine = [order for order in self._orders.values() if self.worker in order.workers]
        return min(mine, key=lambda order: order.generation, default=None)

    @property
    def _recovery_order(self) -> Order | None:
        recoveries = (order for order in self._orders.values() if order.is_recovery)
        return max(recoveries, key=lambda order: order.generation, default=None)

    @property
    def _newest(self) -> Order:
        return self._orders[max(self._orders)]

    @property
    def _newest_generation(self) -> int:
        return max(self._orders, default=self._current.generation if self._current else 0)

    def _is_superseded(self, generation: int) -> bool:
        order = self._recovery_order
        return order is not None and order.generation > generation

    def _change_role(self, new: Role) -> None:
        if new not in TRANSITIONS[self._role]:
            raise IllegalTransition(self.worker, self._role, new)
        self._role = new

    def _on_order(self, order: Order) -> list[Command]:
        if self._role is Role.NEW and self.worker in order.workers:
            self._change_role(Role.JOINING)
        is_first = order.cold_start and self._current is None  # the run begins with it, whatever was ordered since
        if order.generation in self._orders or (order.generation <= self._newest_generation and not is_first):
            return self._advance_joining()
        self._orders[order.generation] = order
        self._asked = None
        if not order.is_recovery:
            return [*self._connect(order), *self._advance_joining()]
        if self._role is not Role.NEW and self.worker not in order.workers:
            return self._on_dropped()
        return [*self._connect(order), *self._abandon_round(), *self._send_committed_rounds()]

    def _on_dropped(self) -> list[Command]:
        if self._successor is None:
            return self._withdraw()
        self._change_role(Role.RELEASED)
        return []

    def _abandon_round(self) -> list[Command]:
        order, current = self._recovery_order, self._current
        if order is None or current is None:
            return []
        lost = [worker for worker in current.workers if worker not in order.workers]
        return [AbandonRound(lost[0] if lost else self.worker, current.generation)]

    def _send_committed_rounds(self) -> list[Command]:
        """Of a recovery that is active already too: a link may have broken before its peer learned the rounds."""
        order = self._recovery_order or (self._current if self._current and self._current.is_recovery else None)
        return [*self._progress.send(order, self.worker, self._links)] if order else []

    def _on_link_up(self, peer: int) -> list[Command]:
        self._links.add(peer)
        commands: list[Command] = [SendToPeer(peer, Heartbeat(generation=self._newest_generation))]
        if self._current and not self.counts_on(peer):
            commands.append(SendToPeer(peer, ActiveGeneration(generation=self._current.generation)))
        return [*commands, *self._send_committed_rounds(), *self._advance_joining()]

    def _on_link_down(self, peer: int) -> list[Command]:
        self._links.discard(peer)
        self._asked = None if self._asked == peer else self._asked
        self._ready_from = {item for item in self._ready_from if item[0] != peer}
        self._ready_to = {item for item in self._ready_to if item[0] != peer}
        self._progress.forget(peer)
        return [*self._connect(self._newest), *self._advance_joining()] if self._orders else []

    def _connect(self, order: Order) -> list[Command]:
        """The higher id connects to the lower; leavers connect to all if nobody continues: joiners do not know them."""
        replaces_all = self._is_replaced_with_all(order)
        return [
            Connect(member, order.generation)
            for member in order.members
            if member.worker not in self._links
            and ((self.worker in order.workers and member.worker < self.worker) or replaces_all)
        ]

    def _advance_joining(self) -> list[Command]:
        """What a worker that has not been a member yet can do now."""
        recovery = self._recovery_order
        must_recover = recovery is not None and self.worker in recovery.workers
        if self._current is not None or must_recover or not self._orders:
            return []
        if self._newest.is_recovery and self._role is Role.JOINING:
            return self._withdraw()
        commands: list[Command] = []
        for generation, order in sorted(self._orders.items()):
            if not self._can_join(order):
                continue
            if order.cold_start:
                return self._become_member(order)
            for peer in sorted(self._links):
                if (peer, generation) not in self._ready_to:
                    self._ready_to.add((peer, generation))
                    commands.append(SendToPeer(peer, JoinerReady(generation=generation)))
        if self._is_left_out() and not self._may_receive_state():
            return self._withdraw()
        return commands

    def _can_join(self, order: Order) -> bool:
        """Whether this worker, which is no member yet, is ready for ``order``."""
        is_mine = self._current is None and self.worker in order.workers and not order.is_recovery
        return is_mine and self._is_ready and self._is_linked_to(order.workers)

    def _is_left_out(self) -> bool:
        """Whether the newest order drops this joiner; not so for a member of the initial generation."""
        is_initial = any(order.cold_start and self.worker in order.workers for order in self._orders.values())
        return self._role is Role.JOINING and not is_initial and self.worker not in self._newest.workers

    def _may_receive_state(self) -> bool:
        """Whether a worker that is or becomes a member may count on this joiner being ready.

        Ids rise with the order that names them first, so a higher id can be a member only when this worker is one, or
        never will be.
        """
        return any(peer < self.worker for peer, _ in self._ready_to)

    def _on_active_generation(self, generation: int) -> list[Command]:
        """An active generation without this worker ends its waiting."""
        if self._successor is not None and generation > self._successor.generation:
            self._change_role(Role.RELEASED)
        if self._role is not Role.JOINING:
            return []
        is_later_member = any(h >= generation and self.worker in order.workers for h, order in self._orders.items())
        return [] if is_later_member else self._withdraw()

    def _withdraw(self) -> list[Command]:
        self._change_role(Role.WITHDRAWN)
        return [Withdraw()]

    def _on_round_completed(self, named: Sequence[int]) -> list[Command]:
        assert self._current is not None
        agreed = named[0]
        if self._recovery_order or agreed <= self._current.generation or any(other != agreed for other in named):
            return []
        switch = Switch(self._current, self._orders[agreed])
        if self.worker not in switch.new.workers:
            self._change_role(Role.LEAVING)
            self._successor = switch.new
            return [switch, *self._send_active(switch.new, but=switch.old.workers)]
        return [switch, *self._become_member(switch.new, but=switch.old.workers)]

    def _become_member(self, order: Order, *, but: Iterable[int] = ()) -> list[Command]:
        self._change_role(Role.MEMBER)
        self._current, self._successor = order, None
        self._orders = {h: newer for h, newer in self._orders.items() if h > order.generation}
        self._ready_from = {item for item in self._ready_from if item[1] > order.generation}
        connects = self._connect(self._newest) if self._orders else []
        return [*self._send_active(order, but=but), *connects]

    def _send_active(self, order: Order, *, but: Iterable[int]) -> list[Command]:
        """Send that ``order`` is active to the peers that are linked only because of a superseded order."""
        newer = [later for h, later in self._orders.items() if h > order.generation]
        awaited = {worker for later in newer for worker in later.workers}
        outside = self._links - set(order.workers) - set(but) - awaited
        return [SendToPeer(peer, ActiveGeneration(generation=order.generation)) for peer in sorted(outside)]

    def _has_formed(self, order: Order) -> bool:
        if self._current is None or order.is_recovery:
            return False
        if self.worker not in order.workers and not self._is_replaced_with_all(order):
            return True
        joiners = [worker for worker in order.workers if worker not in self._current.workers]
        return self._is_linked_to(order.workers) and all((j, order.generation) in self._ready_from for j in joiners)

    def _is_replaced_with_all(self, order: Order) -> bool:
        """Whether no member of the current generation continues in ``order``."""
        if self._current is None or self._role is not Role.MEMBER:
            return False
        return set(self._current.workers).isdisjoint(order.workers)

    def _is_linked_to(self, workers: Iterable[int]) -> bool:
        return all(worker == self.worker or worker in self._links for worker in workers)
