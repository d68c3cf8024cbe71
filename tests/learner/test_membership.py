"""The generation switch under reordered, doubled and lost messages, without threads, sockets or clocks."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.membership import (
    Announce,
    Announced,
    Command,
    Connect,
    Event,
    LinkDown,
    LinkUp,
    Membership,
    OrderSeen,
    RoundDone,
    ScriptReady,
    Start,
    StateReceived,
    Switch,
    TellInForce,
    TellOrder,
    ToldInForce,
    Withdraw,
)
from resile_learner.messages import Member, Order


def order(generation: int, *workers: int, **more: object) -> Order:
    members = tuple(Member(worker=w, host="127.0.0.1", port=1000 + w) for w in workers)
    return Order(job="j", generation=generation, members=members, secret="s", founding=generation == 1, **more)


@dataclass
class Node:
    machine: Membership
    round: int | None = None  # the next round it takes part in; None while it is no member
    named: bool = False
    gone: str = ""


@dataclass
class World:
    """Workers, what is on its way between them, and what they did: the protocol without anything real."""

    nodes: dict[int, Node] = field(default_factory=dict)
    in_flight: list[tuple[int, Event]] = field(default_factory=list)
    states: list[tuple[int, int, int]] = field(default_factory=list)  # joiner, generation, round
    lineage: dict[int, Order] = field(default_factory=dict)  # round -> the generation that trained it
    headers: dict[int, dict[int, int]] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    handed: set[tuple[int, int]] = field(default_factory=set)
    owed: dict[int, set[int]] = field(default_factory=dict)  # leavers and the joiners whose confirmation they wait for

    def order(self, workers: tuple[int, ...], told: tuple[int, ...]) -> None:
        new = order(len(self.orders) + 1, *workers)
        self.orders.append(new)
        for worker in workers:
            if worker not in self.nodes:
                self.nodes[worker] = Node(Membership(worker))
                self.in_flight.append((worker, ScriptReady()))
        for worker in {*told, *(w for w in workers if w not in self.members())}:
            if worker in self.nodes and not new.founding:
                self.in_flight.append((worker, OrderSeen(new)))
            elif worker in self.nodes:  # the agent's first word: it comes before anything a link could bring
                self.post(worker, OrderSeen(new))

    def members(self) -> set[int]:
        return {worker for worker, node in self.nodes.items() if node.round is not None and not node.gone}

    def deliver(self, index: int, *, again: bool) -> None:
        worker, event = self.in_flight[index % len(self.in_flight)]
        if not again:
            self.in_flight.pop(index % len(self.in_flight))
        self.post(worker, event)

    def post(self, worker: int, event: Event) -> None:
        node = self.nodes[worker]
        if node.gone:
            return
        for command in node.machine.handle(event):
            self.carry_out(worker, node, command)

    def carry_out(self, worker: int, node: Node, command: Command) -> None:
        match command:
            case Connect(member, _):
                if not self.nodes[member.worker].gone:
                    self.in_flight += [(worker, LinkUp(member.worker)), (member.worker, LinkUp(worker))]
            case TellOrder(peer, told):
                self.in_flight.append((peer, OrderSeen(told)))
            case Announce(peer, generation):
                self.in_flight.append((peer, Announced(worker, generation)))
            case TellInForce(peer, generation):
                self.in_flight.append((peer, ToldInForce(generation)))
            case Start(_):
                assert node.round is None
                node.round = 0
            case Switch() as switch:
                self.switch(worker, node, switch)
            case Withdraw():
                assert node.round is None, "a member never withdraws"
                self.leave(worker, "withdrawn")

    def switch(self, worker: int, node: Node, switch: Switch) -> None:
        assert node.round is not None
        for joiner in switch.receivers_of(worker):
            assert (joiner, switch.new.generation) not in self.handed, "one donor for each joiner"
            self.handed.add((joiner, switch.new.generation))
            assert not self.nodes[joiner].gone, "a joiner that may become a member waits"
            self.states.append((joiner, switch.new.generation, node.round + 1))
        if worker not in switch.new.workers and not switch.receivers_of(worker):
            self.leave(worker, "left")
        elif worker not in switch.new.workers:
            node.gone = "letting go"
            self.owed[worker] = set(switch.receivers_of(worker))

    def leave(self, worker: int, how: str) -> None:
        self.nodes[worker].gone = how
        self.in_flight = [
            item for item in self.in_flight if item[1] != LinkUp(worker)
        ]  # a link is up before it is down
        for other in self.nodes:
            if other != worker:
                self.in_flight.append((other, LinkDown(worker)))

    def hand_over(self, index: int) -> None:
        joiner, generation, round_ = self.states.pop(index % len(self.states))
        node = self.nodes[joiner]
        assert node.round is None, "a member has state already"
        self.post(joiner, StateReceived(generation))
        node.round = round_
        for donor, other in self.nodes.items():
            if other.gone == "letting go" and joiner in self.owed[donor]:
                self.owed[donor].discard(joiner)
                if not self.owed[donor]:
                    self.leave(donor, "left")

    def name(self, worker: int) -> None:
        """A member has computed its part and sends its header."""
        node = self.nodes[worker]
        if node.named or node.gone or node.round is None:
            return
        current = node.machine.current
        assert current is not None
        assert self.lineage.setdefault(node.round, current) == current, "one lineage"
        self.headers.setdefault(node.round, {})[worker] = node.machine.named(node.round + 1)
        node.named = True

    def finish(self, worker: int) -> None:
        """All headers of a member's round are there."""
        node = self.nodes[worker]
        if node.gone or node.round is None or not node.named:
            return
        headers, members = self.headers[node.round], self.lineage[node.round].workers
        if set(headers) != set(members):
            return
        self.post(worker, RoundDone(tuple(headers[member] for member in members)))
        node.round, node.named = node.round + 1, False

    def settle(self) -> None:
        """Deliver everything and go on training until nothing changes any more."""
        for _ in range(8 + 4 * len(self.orders)):
            while self.in_flight:
                self.deliver(0, again=False)
            while self.states:
                self.hand_over(0)
            for worker in sorted(self.nodes):
                self.name(worker)
            for worker in sorted(self.nodes):
                self.finish(worker)
        while self.in_flight:
            self.deliver(0, again=False)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_order_of_messages_keeps_one_lineage_and_ends_in_the_newest_generation(data: st.DataObject) -> None:
    world = World()
    next_worker = data.draw(st.integers(1, 4))
    world.order(tuple(range(next_worker)), tuple(range(next_worker)))
    steps = data.draw(st.integers(5, 120))
    for _ in range(steps):
        action = data.draw(
            st.sampled_from(["deliver", "deliver", "deliver", "again", "state", "name", "name", "finish", "order"])
        )
        if action == "order" and len(world.orders) < 6 and world.members():
            before = world.orders[-1].workers
            kept = tuple(w for w in before if data.draw(st.booleans()))
            joining = tuple(range(next_worker, next_worker + data.draw(st.integers(0 if kept else 1, 3))))
            next_worker += len(joining)
            everyone = tuple(world.nodes)
            told = tuple(w for w in everyone if data.draw(st.booleans())) or tuple(world.members())
            world.order(kept + joining, told)
        elif action in ("deliver", "again") and world.in_flight:
            world.deliver(data.draw(st.integers(0, len(world.in_flight) - 1)), again=action == "again")
        elif action == "state" and world.states:
            world.hand_over(data.draw(st.integers(0, len(world.states) - 1)))
        elif action in ("name", "finish"):
            getattr(world, action)(data.draw(st.sampled_from(sorted(world.nodes))))
    for worker in world.nodes:  # the agent repeats its word: at least the newest order reaches everyone in the end
        world.in_flight.append((worker, OrderSeen(world.orders[-1])))
    world.settle()

    newest = world.orders[-1]
    assert world.members() == set(newest.workers)
    assert {world.nodes[w].machine.current for w in newest.workers} == {newest}
    for worker, node in world.nodes.items():
        assert node.gone or worker in newest.workers, f"worker {worker} waits for ever"
    assert sorted(world.lineage) == list(range(len(world.lineage))), "no round lost"
    generations = [world.lineage[r].generation for r in sorted(world.lineage)]
    assert generations == sorted(generations), "generations only rise"


def member_of(current: Order, worker: int) -> Membership:
    machine = Membership(worker)
    machine.handle(OrderSeen(current))
    for other in current.workers:
        if other != worker:
            machine.handle(LinkUp(other))
    machine.handle(ScriptReady())
    assert machine.current == current
    return machine


def test_a_member_names_a_generation_only_when_its_joiner_is_linked_and_ready() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderSeen(order(2, 0, 1, 2)))
    assert machine.named(1) == 1
    machine.handle(LinkUp(2))
    assert machine.named(1) == 1
    machine.handle(Announced(2, 2))
    assert machine.named(1) == 2


def test_headers_that_disagree_change_nothing() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderSeen(order(2, 0)))
    assert machine.named(1) == 2
    assert machine.handle(RoundDone((2, 1))) == []
    assert machine.current == order(1, 0, 1)


def test_old_orders_have_no_effect() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderSeen(order(3, 0)))
    assert machine.handle(OrderSeen(order(2, 0, 1, 5))) == []
    (switch,) = machine.handle(RoundDone((3, 3)))
    assert isinstance(switch, Switch)
    assert switch.new == order(3, 0)


def test_a_plan_is_neither_early_nor_late() -> None:
    machine = member_of(order(1, 0, 1, until=10), 0)
    assert not machine.must_wait(9)
    assert machine.must_wait(10)
    machine.handle(OrderSeen(order(2, 0, not_before=10)))
    assert machine.named(9) == 1
    assert machine.named(10) == 2
    assert not machine.must_wait(10)


def test_a_superseded_joiner_that_was_announced_waits_for_a_member_to_say_so() -> None:
    machine = Membership(2)
    machine.handle(OrderSeen(order(2, 0, 2)))
    machine.handle(ScriptReady())
    assert Announce(0, 2) in machine.handle(LinkUp(0))
    assert Withdraw() not in machine.handle(OrderSeen(order(3, 0)))
    assert machine.handle(ToldInForce(3)) == [Withdraw()]


def test_a_superseded_joiner_that_nobody_counts_on_withdraws_at_once() -> None:
    machine = Membership(2)
    machine.handle(OrderSeen(order(2, 0, 2)))
    assert machine.handle(OrderSeen(order(3, 0)))[-1] == Withdraw()


@pytest.mark.parametrize("workers", [(3,), (3, 4)])
def test_leavers_hand_over_when_nobody_continues(workers: tuple[int, ...]) -> None:
    machine = member_of(order(1, 0, 1), 1)
    commands = machine.handle(OrderSeen(order(2, *workers)))
    assert [c.member.worker for c in commands if isinstance(c, Connect)] == list(workers)
    for worker in workers:
        assert machine.named(1) == 1
        machine.handle(LinkUp(worker))
        machine.handle(Announced(worker, 2))
    assert machine.named(1) == 2
    (switch,) = machine.handle(RoundDone((2, 2)))
    assert isinstance(switch, Switch)
    assert switch.receivers_of(0) == workers[:1]
    assert switch.receivers_of(1) == workers[1:]
