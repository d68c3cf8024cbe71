"""A world of workers without threads, sockets or clocks: what is on its way between them, and what each has committed.

Messages arrive in any order and perhaps twice. A worker that dies takes with it any part of what it had not quite
sent, so that a round may be committed by some members and abandoned by others.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from resile_learner.membership.events import (
    AbandonRound,
    Command,
    Connect,
    Event,
    LinkDown,
    LinkUp,
    MessageReceived,
    OrderReceived,
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
from resile_learner.membership.machine import Membership
from resile_learner.membership.view import MembershipView
from resile_learner.messages import Heartbeat, Member, Order, PeerMessage

Draw = Callable[[], bool]
Phase = Literal["joining", "computing", "exchanging", "lost", "syncing state", "leaving"]


def order(generation: int, *workers: int, **more: object) -> Order:
    members = tuple(Member(worker=w, host="127.0.0.1", port=1000 + w) for w in workers)
    return Order(job="j", generation=generation, members=members, secret="s", cold_start=generation == 1, **more)


def received(sender: int, message: PeerMessage) -> Event:
    return OrderReceived(message) if isinstance(message, Order) else MessageReceived(sender, message)


@dataclass(frozen=True)
class Abort:
    """A member of ``generation`` has given up ``round``."""

    generation: int
    round: int


@dataclass(frozen=True)
class Confirm:
    """``sender`` has committed the last round of the leaver, or has taken its state over."""

    sender: int
    generation: int


class Sent(NamedTuple):
    """A message on its way; ``sender`` is None for the agent's word and for what needs no sender."""

    receiver: int
    event: Event | Abort | Confirm
    sender: int | None = None


@dataclass
class Node:
    machine: Membership
    phase: Phase = "joining"
    history: tuple[int, ...] | None = None
    """For each round that its state contains the generation that trained it; None until it has a state."""
    committed: tuple[int, ...] = ()
    """The longest history it ever had."""
    gone: str = ""
    suspects: int | None = None
    """The generation whose open or next round it shall leave."""
    aborted: set[tuple[int, int]] = field(default_factory=set)
    arrived: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """For each round of a generation what the headers of those say from whom everything is there."""
    sync: SyncState | None = None
    owed: list[int] = field(default_factory=list)
    """To whom its state is still to be given."""
    switch: Switch | None = None
    confirmed: set[Confirm] = field(default_factory=set)
    linked: set[int] = field(default_factory=set)

    @property
    def view(self) -> MembershipView:
        return self.machine.view

    @property
    def generation(self) -> int:
        assert self.view.current is not None
        return self.view.current.generation

    @property
    def round(self) -> int:
        """The next one."""
        return -1 if self.history is None else len(self.history)


@dataclass
class World:
    draw: Draw = lambda: False
    nodes: dict[int, Node] = field(default_factory=dict)
    in_flight: list[Sent] = field(default_factory=list)
    states: list[tuple[int, int, int, tuple[int, ...]]] = field(default_factory=list)  # donor, receiver, generation
    orders: list[Order] = field(default_factory=list)
    active: set[int] = field(default_factory=set)
    recovered: dict[int, tuple[int, ...]] = field(default_factory=dict)  # generation -> the history it began with
    dropped: set[int] = field(default_factory=set)  # by a recovery order
    believed: int = 1  # the generation that the scheduler believes active

    # the scheduler

    def order(self, workers: tuple[int, ...], told: tuple[int, ...], *, is_recovery: bool = False) -> None:
        new = order(len(self.orders) + 1, *workers, is_recovery=is_recovery)
        self.orders.append(new)
        for worker in workers:
            if worker not in self.nodes:
                self.nodes[worker] = Node(Membership(worker))
                self.in_flight.append(Sent(worker, ScriptReady()))
        for worker in {*told, *(w for w in workers if w not in self.members())}:
            if new.cold_start:  # the agent's first word: it comes before anything a link could bring
                self.post(worker, OrderReceived(new))
            elif worker in self.nodes:
                self.in_flight.append(Sent(worker, OrderReceived(new)))

    def recover(self, told: tuple[int, ...]) -> bool:
        """Order the living of the generation believed active to go on; False where there is nobody left."""
        members = self.orders[self.believed - 1].workers
        alive = [w for w in members if w not in self.dropped and not self.nodes[w].gone]
        newest = self.orders[-1].workers
        survivors = tuple(w for w in alive if w in newest) or tuple(alive)
        if not survivors:
            return False
        self.dropped |= set(self.nodes) - set(survivors)
        self.order(survivors, told, is_recovery=True)
        return True

    def tell(self, workers: Iterable[int]) -> None:
        """Have the agents of ``workers`` send them the newest order."""
        self.in_flight += (Sent(worker, OrderReceived(self.orders[-1])) for worker in sorted(workers))

    @property
    def is_recovering(self) -> bool:
        newest = self.orders[-1]
        return newest.is_recovery and newest.generation not in self.active

    def members(self) -> set[int]:
        return {w for w, node in self.nodes.items() if node.view.current is not None and not node.gone}

    def living(self) -> list[int]:
        return [worker for worker, node in sorted(self.nodes.items()) if not node.gone]

    def reachable_from(self, workers: Iterable[int]) -> set[int]:
        """The living workers that are linked to one of ``workers``, directly or by others."""
        reached: set[int] = set()
        waiting = {worker for worker in workers if worker in self.nodes and not self.nodes[worker].gone}
        while waiting:
            reached |= waiting
            linked = set().union(*(self.nodes[worker].linked for worker in waiting))
            waiting = {worker for worker in linked - reached if not self.nodes[worker].gone}
        return reached

    # what is on its way

    def deliver(self, index: int, *, again: bool) -> None:
        sent = self.in_flight[index % len(self.in_flight)]
        if not again:
            self.in_flight.pop(index % len(self.in_flight))
        node = self.nodes[sent.receiver]
        match sent.event:
            case Abort(generation, round_):
                node.aborted.add((generation, round_))
            case Confirm() as confirm:
                node.confirmed.add(confirm)
            case event:
                self.post(sent.receiver, event)

    def heartbeat(self, worker: int, peers: Iterable[int]) -> None:
        """What ``worker`` sends its peers again and again."""
        node = self.nodes[worker]
        if not node.gone:
            for peer in node.linked.intersection(peers):
                self.send(worker, peer, received(worker, Heartbeat(generation=node.view.newest)))

    def post(self, worker: int, event: Event) -> None:
        node = self.nodes[worker]
        if node.gone:
            return
        match event:
            case LinkUp(peer):
                node.linked.add(peer)
            case LinkDown(peer):
                node.linked.discard(peer)
        for command in node.machine.handle(event):
            self.carry_out(worker, node, command)
        current = node.view.current
        if current is not None and not node.gone:
            self.active.add(current.generation)
            if node.phase == "joining" and node.history is None:
                node.phase, node.history = "computing", ()  # an initial member, with a state of its own

    def send(self, sender: int, receiver: int, event: Event | Abort | Confirm) -> None:
        self.in_flight.append(Sent(receiver, event, sender))

    def carry_out(self, worker: int, node: Node, command: Command) -> None:
        match command:
            case Connect(member, _):
                if not self.nodes[member.worker].gone:
                    self.send(member.worker, worker, LinkUp(member.worker))
                    self.send(worker, member.worker, LinkUp(worker))
            case SendToPeer(peer, message):
                self.send(worker, peer, received(worker, message))
            case AbandonRound(_, generation):
                node.suspects = generation
            case Switch() as switch:
                self.switch(worker, node, switch)
            case SyncState() as sync:
                self.begin_state_sync(worker, node, sync)
            case Withdraw():
                assert node.view.current is None or worker in self.dropped, "no member withdraws"
                self.end(worker, "withdrawn")

    def switch(self, worker: int, node: Node, switch: Switch) -> None:
        assert node.history is not None
        for leaver in switch.leavers:
            self.send(worker, leaver, Confirm(worker, switch.new.generation))
        for joiner in switch.receivers_of(worker):
            self.states.append((worker, joiner, switch.new.generation, node.history))
        if worker not in switch.new.workers:
            node.phase, node.switch = "leaving", switch

    def end(self, worker: int, how: str) -> None:
        """The end of a process: its links go down, and the peers learn so by and by."""
        self.nodes[worker].gone = how
        self.in_flight = [sent for sent in self.in_flight if sent.event != LinkUp(worker)]
        for other in self.nodes:
            if other != worker:
                self.in_flight.append(Sent(other, LinkDown(worker)))

    def kill(self, worker: int) -> None:
        if self.nodes[worker].gone:
            return
        self.in_flight = [sent for sent in self.in_flight if sent.sender != worker or self.draw()]
        self.states = [state for state in self.states if state[0] != worker or self.draw()]
        self.cut_short(worker)
        self.end(worker, "killed")

    def cut_short(self, worker: int) -> None:
        """Of what it sends in its round under way any part has not left."""
        for other in self.nodes.values():
            for (generation, round_), headers in other.arrived.items():
                mine = self.nodes[worker]
                if mine.view.current and (generation, round_) == (mine.generation, mine.round) and self.draw():
                    headers.pop(worker, None)

    # the main thread of a worker

    def step(self, worker: int) -> None:
        """What its main thread does next, if anything."""
        node = self.nodes[worker]
        if node.gone:
            return
        match node.phase:
            case "joining":
                self.join(worker, node)
            case "computing" if not self.give_up(worker, node):
                self.name(worker, node)
            case "exchanging":
                self.exchange(worker, node)
            case "lost":
                self.wait(worker, node)
            case "syncing state":
                self.sync_state(worker, node)
            case "leaving":
                self.leave(worker, node)

    def join(self, worker: int, node: Node) -> None:
        known = [state for state in self.states if state[1] == worker and not node.view.is_superseded(state[2])]
        if node.view.must_recover and (not known or self.draw()):
            self.lose(worker, node)
        elif known:
            self.states.remove(known[0])
            _, _, generation, history = known[0]
            node.history = history
            self.post(worker, StateReceived(generation))
            node.phase = "computing"
            for other in set(self.nodes) - set(self.orders[generation - 1].workers):
                self.send(worker, other, Confirm(worker, generation))

    def name(self, worker: int, node: Node) -> None:
        """It has computed its part and sends all of it."""
        assert node.view.current is not None
        key = (node.generation, node.round)
        for member in node.view.current.workers:
            self.nodes[member].arrived.setdefault(key, {})[worker] = node.view.named(node.round + 1)
        node.phase = "exchanging"

    def exchange(self, worker: int, node: Node) -> None:
        actions = [self.finish, self.give_up]
        for action in actions if self.draw() else reversed(actions):
            if node.phase == "exchanging":
                action(worker, node)

    def finish(self, worker: int, node: Node) -> None:
        """Commit, if everything from all members is there."""
        current = node.view.current
        assert current is not None
        assert node.history is not None
        headers = node.arrived[node.generation, node.round]
        if set(headers) != set(current.workers):
            return
        self.check_commit(worker, node)
        node.history = (*node.history, node.generation)
        assert node.history[: len(node.committed)] == node.committed, "nothing committed is given up"
        node.committed = node.history
        node.phase = "computing"
        self.post(worker, RoundCompleted(tuple(headers[member] for member in current.workers)))

    def check_commit(self, worker: int, node: Node) -> None:
        members = set(self.orders[node.generation - 1].workers)
        for generation, history in self.recovered.items():
            newer = set(self.orders[generation - 1].workers)
            if generation > node.generation and members & newer:
                assert node.round < len(history) + (worker not in newer), "who was dropped ends its round at the most"

    def give_up(self, worker: int, node: Node) -> bool:
        """Abandon the round if there is a reason to."""
        assert node.view.current is not None
        key = (node.generation, node.round)
        missing = set(node.view.current.workers) - set(node.arrived.get(key, {}))
        suspects, node.suspects = node.suspects, None
        reason = suspects == node.generation or key in node.aborted or any(self.nodes[w].gone for w in missing)
        if not reason:
            return False
        self.cut_short(worker)
        for member in node.view.current.workers:
            if member != worker:
                self.send(worker, member, Abort(*key))
        self.lose(worker, node)
        return True

    def lose(self, worker: int, node: Node) -> None:
        node.phase, node.sync, node.switch = "lost", None, None
        self.post(worker, RoundAbandoned(node.round))

    # recovery, and leaving

    def wait(self, worker: int, node: Node) -> None:
        if node.view.is_released:
            self.end(worker, "left")
        elif node.view.can_sync_state:
            self.post(worker, StateSyncRequested())

    def begin_state_sync(self, worker: int, node: Node, sync: SyncState) -> None:
        node.phase, node.sync = "syncing state", sync
        node.owed = list(sync.receivers_of(worker))
        for member in sync.donors:
            assert sync.round <= max(self.nodes[member].round, len(self.nodes[member].committed))
        assert sync.round == -1 or sync.round >= len(node.committed), "the state furthest ahead wins"
        if sync.round == -1:
            assert node.view.current is None, "a member has a state, newer or older"
            self.end(worker, "without any state")

    def sync_state(self, worker: int, node: Node) -> None:
        sync = node.sync
        assert sync is not None
        generation, donor = sync.order.generation, sync.donor_of(worker)
        arrived = [s for s in self.states if s[1] == worker and s[2] == generation and s[0] == donor]
        if node.view.is_superseded(generation) and (donor is None or not arrived or self.draw()):
            self.miss_state(worker, node)
        elif donor is not None and arrived:
            self.states.remove(arrived[0])
            node.history = arrived[0][3]
            self.state_synced(worker, node, sync)
        elif donor is not None:
            if self.nodes[donor].gone:
                self.miss_state(worker, node)
        elif node.owed:
            self.give_state(worker, node, generation)
        else:
            self.state_synced(worker, node, sync)

    def miss_state(self, worker: int, node: Node) -> None:
        """It does not get all of a newer state, and keeps its own, if it has one."""
        self.states = [state for state in self.states if state[1] != worker]
        self.lose(worker, node)

    def give_state(self, worker: int, node: Node, generation: int) -> None:
        receiver = node.owed.pop(0)
        assert node.history is not None
        if self.nodes[receiver].gone:
            self.lose(worker, node)
        else:
            self.states.append((worker, receiver, generation, node.history))

    def state_synced(self, worker: int, node: Node, sync: SyncState) -> None:
        assert node.history is not None
        generation = sync.order.generation
        assert node.history[: len(node.committed)] == node.committed, "nothing committed is given up"
        assert self.recovered.setdefault(generation, node.history) == node.history, "all begin with one state"
        node.committed = node.history
        self.post(worker, StateSynced(generation, node.round))
        if node.view.current is not None and node.generation == generation:
            node.phase, node.sync = "computing", None
        else:
            self.lose(worker, node)

    def leave(self, worker: int, node: Node) -> None:
        switch = node.switch
        assert switch is not None
        if node.view.is_released:
            self.end(worker, "left")
        elif node.view.must_recover:
            self.lose(worker, node)
        else:
            heirs = switch.continuing or switch.joiners
            confirmed = {c.sender for c in node.confirmed if c.generation == switch.new.generation}
            awaited = {*switch.old.workers, *heirs} - {worker} - confirmed
            if any(not self.nodes[other].gone for other in awaited):
                return
            if confirmed & set(heirs):
                self.end(worker, "left")
            else:
                self.lose(worker, node)

    def settle(self) -> None:
        """Deliver everything and go on until nothing changes any more."""
        for _ in range(12 + 6 * len(self.orders)):
            while self.in_flight:
                self.deliver(0, again=False)
            for worker in sorted(self.nodes):
                self.heartbeat(worker, self.nodes)
                self.step(worker)
        while self.in_flight:
            self.deliver(0, again=False)


class Fate:
    """Draws what happens next in a world, from ``actions``."""

    def __init__(self, choices: random.Random, actions: Sequence[str]) -> None:
        self.choices = choices
        self.actions = actions
        self.world = World(lambda: choices.random() < 0.5)
        self.next_worker = choices.randint(1, 4)
        self.world.order(tuple(range(self.next_worker)), tuple(range(self.next_worker)))

    def happen(self) -> None:
        world, choices = self.world, self.choices
        match choices.choice(self.actions):
            case ("deliver" | "again") as how if world.in_flight:
                world.deliver(choices.randrange(len(world.in_flight)), again=how == "again")
            case "step":
                world.step(choices.choice(sorted(world.nodes)))
            case "heartbeat":
                sender, receiver = choices.choices(sorted(world.nodes), k=2)
                world.heartbeat(sender, [receiver])
            case "order" if len(world.orders) < 8 and not world.is_recovering and world.members():
                self.order()
            case "kill" if world.active and choices.random() < 0.2:
                self.kill()
            case "recover" if len(world.orders) < 12 and world.active and self.anybody_lost():
                world.recover(self.some())
            case "learn":
                world.believed = max(world.believed, choices.choice(sorted(world.active) or [1]))

    def kill(self) -> None:
        living = self.world.living()
        for worker in self.choices.sample(living, min(len(living), self.choices.choice([1, 1, 1, 2]))):
            self.world.kill(worker)

    def anybody_lost(self) -> bool:
        return any(node.gone == "killed" for node in self.world.nodes.values())

    def some(self) -> tuple[int, ...]:
        return tuple(worker for worker in self.world.nodes if self.choices.random() < 0.5)

    def order(self) -> None:
        kept = tuple(w for w in self.world.orders[-1].workers if self.choices.random() < 0.6)
        num_joining = self.choices.randint(0 if kept else 1, 3)
        joining = tuple(range(self.next_worker, self.next_worker + num_joining))
        self.next_worker += num_joining
        self.world.order(kept + joining, self.some())
