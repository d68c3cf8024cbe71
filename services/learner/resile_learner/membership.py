"""The switch of generations, as one worker sees it: a pure state machine.

Events go in through `Membership.handle`, commands come out; the worker's control thread carries them out. The rules:

- An order names a generation newer than all before it. Old orders have no effect; newer ones are told on to every link.
- A worker that an order drops is never named by a later one, and ids rise with the order that names them first; so
  those who join generation h are the same for everyone.
- A *continuing member* has formed h once it is linked to every member of h and each joiner has announced h. A
  *leaver* has formed h once it has seen the order; where nobody continues, once it is linked to every joiner and each
  has announced h.
- A *joiner* announces h once its script is at the training call and it is linked to every member of h. From then on
  it may become a member of h at any moment, even if it hears of a newer order that drops it; it withdraws when a
  member tells it that such an order is in force, or when all whom it told are gone (a leaver that hands over stays
  until its joiner has the state).
- The header of each round names the highest generation its sender has formed. When all headers of one round name the
  same newer generation, and only then, all members switch to it.
- A *leaver* stays until those who go on have told it that they committed its last round; if none of them lives to do
  so, it waits for an order that recovers.
- An order that *recovers* has no part in this, and as long as it is not in force nothing else is agreed on. It names
  workers of the generation that is thought to be in force: members, leavers that have not left, and joiners to whom the
  state was not handed yet. Whoever sees it leaves the round under way, if that did not break down by itself. Those it
  names tell each other which round they have come to; once one has heard it of all others, they become level (who is
  behind takes the state of one that is ahead), and it is the current generation. Those it drops exit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .messages import Member, Order
from .recovery import LeaveRound, Levelled, Levelling, Recovery, RoundLost, Standings, StandingTold, TellStanding


@dataclass(frozen=True)
class OrderSeen:
    """An order arrived, from the agent or from a peer, perhaps not for the first time."""

    order: Order


@dataclass(frozen=True)
class LinkUp:
    """Both connections to ``peer`` are up and proven."""

    peer: int


@dataclass(frozen=True)
class LinkDown:
    """The connection to ``peer`` is gone."""

    peer: int


@dataclass(frozen=True)
class ScriptReady:
    """This worker's script has reached its training call."""


@dataclass(frozen=True)
class Announced:
    """``peer``, a joiner, is ready and linked to all members of ``generation``."""

    peer: int
    generation: int


@dataclass(frozen=True)
class ToldInForce:
    """A member says that ``generation`` is the current one."""

    generation: int


@dataclass(frozen=True)
class RoundDone:
    """All headers of a round are here; ``named[r]`` is what rank r's header named."""

    named: tuple[int, ...]


@dataclass(frozen=True)
class StateReceived:
    """This joiner holds the full state and so is a member of ``generation``."""

    generation: int


RecoveryEvent = RoundLost | StandingTold | Levelling | Levelled
Event = (
    OrderSeen | LinkUp | LinkDown | ScriptReady | Announced | ToldInForce | RoundDone | StateReceived | RecoveryEvent
)


@dataclass(frozen=True)
class Connect:
    """Dial ``member`` and prove the secret of ``generation``."""

    member: Member
    generation: int


@dataclass(frozen=True)
class TellOrder:
    """Tell ``peer`` of ``order``."""

    peer: int
    order: Order


@dataclass(frozen=True)
class Announce:
    """Tell ``peer`` that this joiner is ready and fully linked for ``generation``."""

    peer: int
    generation: int


@dataclass(frozen=True)
class TellInForce:
    """Tell ``peer``, whose order was superseded, which generation is current."""

    peer: int
    generation: int


@dataclass(frozen=True)
class Start:
    """The founding generation is formed here: begin, each founder with its own initial state."""

    order: Order


@dataclass(frozen=True)
class Switch:
    """``new`` is the current generation from the next round on; ``old`` was it until now."""

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
class Withdraw:
    """This joiner is not needed any more and can never become a member: exit."""


Command = Connect | TellOrder | Announce | TellInForce | TellStanding | LeaveRound | Start | Switch | Withdraw


class Membership:
    """The machine of one worker.

    ``current`` is the order of the generation it is a member of, None before that; ``formed`` the highest generation
    it has formed.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.current: Order | None = None
        self._orders: dict[int, Order] = {}
        self._links: set[int] = set()
        self._ready = False
        self._named = False  # by any order seen, be it old
        self._over = False
        self._leaves_for: Order | None = None
        self._is_released = False
        self._announcements: set[tuple[int, int]] = set()
        self._announced: set[tuple[int, int]] = set()
        self._standings = Standings()

    @property
    def first_order(self) -> Order | None:
        """The oldest order known that names this worker, before it is a member."""
        mine = [order for order in self._orders.values() if self.worker in order.workers]
        return min(mine, key=lambda order: order.generation, default=None)

    @property
    def formed(self) -> int:
        """The highest generation this worker has formed, counting the current one; 0 before any."""
        floor = self.current.generation if self.current else 0
        return max((h for h, order in self._orders.items() if h > floor and self._has_formed(order)), default=floor)

    def named(self, next_iteration: int) -> int:
        """What the header of the round before ``next_iteration`` names.

        The highest formed that may train it already.
        """
        assert self.current is not None
        floor = self.current.generation
        able = (
            h for h, o in self._orders.items() if h > floor and o.not_before <= next_iteration and self._has_formed(o)
        )
        return max(able, default=floor)

    def must_wait(self, next_iteration: int) -> bool:
        """Whether the round before ``next_iteration`` has to wait until a newer generation is formed."""
        assert self.current is not None
        until = self.current.until
        return (
            self._recovering is None
            and until is not None
            and next_iteration >= until
            and self.named(next_iteration) == self.current.generation
        )

    @property
    def recovery(self) -> Recovery | None:
        """How the newest generation that recovers begins, once its members are linked and all have told."""
        order = self._recovering
        return self._standings.recovery(order, self.worker) if order and self._linked_to(order.workers) else None

    @property
    def must_recover(self) -> bool:
        """Whether a generation that recovers, and names this worker, is not in force."""
        order = self._recovering
        return order is not None and self.worker in order.workers

    @property
    def is_released(self) -> bool:
        """Whether this leaver may go, whatever it waits for: those who go on have come further without it."""
        return self._is_released

    def counts_on(self, peer: int) -> bool:
        """Whether ``peer`` is a member of the generation in force, or shall be of a newer one."""
        orders = (*self._orders.values(), *([self.current] if self.current else ()))
        return any(peer in order.workers for order in orders)

    def is_superseded(self, generation: int) -> bool:
        """Whether a newer generation than ``generation`` recovers."""
        return self._recovering is not None and self._recovering.generation > generation

    @property
    def _recovering(self) -> Order | None:
        """The newest order that recovers and is not in force."""
        return max((o for o in self._orders.values() if o.is_recovery), key=lambda o: o.generation, default=None)

    def handle(self, event: Event) -> list[Command]:
        """Take ``event`` in; return what is to be done about it, in order."""
        if self._over:
            return []
        match event:
            case OrderSeen(order):
                return self._order_seen(order)
            case LinkUp(peer) | LinkDown(peer):
                return self._link_up(peer) if isinstance(event, LinkUp) else self._link_down(peer)
            case ScriptReady():
                self._ready = True
                return self._progress()
            case Announced(peer, generation):
                self._announcements.add((peer, generation))
                return []
            case ToldInForce(generation):
                return self._told_in_force(generation)
            case RoundDone(named):
                return self._round_done(named)
            case RoundLost() | StandingTold() | Levelling() | Levelled():
                return self._recover(event)
            case StateReceived(generation):
                return [*self._become(self._orders[generation]), *self._leave_round()]

    def _order_seen(self, order: Order) -> list[Command]:
        self._named = self._named or self.worker in order.workers
        newest = max(self._orders, default=self.current.generation if self.current else 0)
        founds = order.cold_start and self.current is None  # the run begins with it, whatever was ordered since
        if order.generation in self._orders or (order.generation <= newest and not founds):
            return self._progress()
        self._orders[order.generation] = order
        told: list[Command] = [TellOrder(peer, order) for peer in sorted(self._links)]
        if not order.is_recovery:
            return [*told, *self._dials(order), *self._progress()]
        if self._named and self.worker not in order.workers:
            return [*told, *self._dropped()]
        return [*told, *self._dials(order), *self._leave_round(), *self._tell_standing()]

    def _leave_round(self) -> list[Command]:
        order, current = self._recovering, self.current
        if order is None or current is None:
            return []
        lost = [worker for worker in current.workers if worker not in order.workers]
        return [LeaveRound(lost[0] if lost else self.worker, current.generation)]

    def _dropped(self) -> list[Command]:
        if self._leaves_for is None:
            return self._withdraw()
        self._is_released = True
        return []

    def _recover(self, event: RecoveryEvent) -> list[Command]:
        match event:
            case StandingTold():
                self._standings.hear(event)
                return []
            case Levelling():
                self._standings.round = None
                return []
            case Levelled(generation) if not self.is_superseded(generation):
                return self._become(self._orders[generation])
            case RoundLost(number) | Levelled(_, number):
                self._standings.round = number
                return self._tell_standing()

    def _tell_standing(self) -> list[Command]:
        order = self._recovering
        return [*self._standings.tell(order, self._links)] if order else []

    def _link_up(self, peer: int) -> list[Command]:
        self._links.add(peer)
        told: list[Command] = [TellOrder(peer, self._orders[max(self._orders)])] if self._orders else []
        if self.current and not any(peer in order.workers for order in (self.current, *self._orders.values())):
            told.append(TellInForce(peer, self.current.generation))
        return [*told, *self._tell_standing(), *self._progress()]

    def _link_down(self, peer: int) -> list[Command]:
        self._links.discard(peer)
        self._announcements = {item for item in self._announcements if item[0] != peer}
        self._announced = {item for item in self._announced if item[0] != peer}
        self._standings.forget(peer)
        if not self._orders:
            return []
        return [*self._dials(self._orders[max(self._orders)]), *self._progress()]

    def _dials(self, order: Order) -> list[Command]:
        """The higher id dials the lower; leavers dial everyone when nobody continues, as joiners do not know them."""
        giving_away = self._gives_all_away(order)
        return [
            Connect(member, order.generation)
            for member in order.members
            if member.worker not in self._links
            and ((self.worker in order.workers and member.worker < self.worker) or giving_away)
        ]

    def _progress(self) -> list[Command]:
        """What a worker that is no member yet can do now."""
        if self.current is not None or self.must_recover or not self._orders:
            return []
        newest = self._orders[max(self._orders)]
        if newest.is_recovery and self._named and self.worker not in newest.workers:
            return self._withdraw()
        commands: list[Command] = []
        for generation, order in sorted(self._orders.items()):
            is_mine = self.worker in order.workers and not order.is_recovery
            if not (is_mine and self._ready and self._linked_to(order.workers)):
                continue
            if order.cold_start:
                return [Start(order), *self._become(order)]
            for peer in sorted(self._links):
                if (peer, generation) not in self._announced:
                    self._announced.add((peer, generation))
                    commands.append(Announce(peer, generation))
        if self._superseded() and not self._may_be_taken():
            return self._withdraw()
        return commands

    def _superseded(self) -> bool:
        founder = any(order.cold_start and self.worker in order.workers for order in self._orders.values())
        return self._named and not founder and self.worker not in self._orders[max(self._orders)].workers

    def _may_be_taken(self) -> bool:
        """Whether somebody who is or becomes a member may count on this joiner's announcement.

        Ids rise with the order that names them first, so a higher id can be a member only when this worker is one, or
        never will be.
        """
        return any(peer < self.worker for peer, _ in self._announced)

    def _told_in_force(self, generation: int) -> list[Command]:
        """A generation in force that drops this worker ends its waiting."""
        if self._leaves_for is not None and generation > self._leaves_for.generation:
            self._is_released = True
            return []
        if self.current is not None or not self._named:
            return []
        later = any(h >= generation and self.worker in order.workers for h, order in self._orders.items())
        return [] if later else self._withdraw()

    def _withdraw(self) -> list[Command]:
        self._over = True
        return [Withdraw()]

    def _round_done(self, named: Sequence[int]) -> list[Command]:
        assert self.current is not None
        agreed = named[0]
        if self._recovering or agreed <= self.current.generation or any(other != agreed for other in named):
            return []
        switch = Switch(self.current, self._orders[agreed])
        if self.worker not in switch.new.workers:
            self._leaves_for = switch.new
            return [switch, *self._tell_in_force(switch.new, but=switch.old.workers)]
        return [switch, *self._become(switch.new, but=switch.old.workers)]

    def _become(self, order: Order, *, but: Iterable[int] = ()) -> list[Command]:
        self.current, self._leaves_for = order, None
        self._orders = {h: newer for h, newer in self._orders.items() if h > order.generation}
        dials = self._dials(self._orders[max(self._orders)]) if self._orders else []
        return [*self._tell_in_force(order, but=but), *dials]

    def _tell_in_force(self, order: Order, *, but: Iterable[int]) -> list[Command]:
        """Tell those who are linked for the sake of a superseded order."""
        newer = [later for h, later in self._orders.items() if h > order.generation]
        awaited = {worker for later in newer for worker in later.workers}
        outside = self._links - set(order.workers) - set(but) - awaited
        return [TellInForce(peer, order.generation) for peer in sorted(outside)]

    def _has_formed(self, order: Order) -> bool:
        if self.current is None or order.is_recovery:
            return False
        members = set(self.current.workers)
        joiners = [worker for worker in order.workers if worker not in members]
        if self.worker not in order.workers and not self._gives_all_away(order):
            return True
        return self._linked_to(order.workers) and all((j, order.generation) in self._announcements for j in joiners)

    def _gives_all_away(self, order: Order) -> bool:
        if self.current is None or self._leaves_for is not None:
            return False
        return set(self.current.workers).isdisjoint(order.workers)

    def _linked_to(self, workers: Iterable[int]) -> bool:
        return all(worker == self.worker or worker in self._links for worker in workers)
