"""The generation switch under reordered, doubled and lost messages, without threads, sockets or clocks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.membership import (
    Announce,
    Announced,
    Connect,
    LinkUp,
    Membership,
    OrderSeen,
    RoundDone,
    ScriptReady,
    Switch,
    ToldInForce,
    Withdraw,
)
from resile_learner.messages import Order

from .membership_world import Fate, Sent, order


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_order_of_messages_keeps_one_lineage_and_ends_in_the_newest_generation(seed: int) -> None:
    choices = random.Random(seed)
    fate = Fate(choices, ["deliver", "deliver", "deliver", "again", "step", "step", "step", "order"])
    world = fate.world
    for _ in range(choices.randint(5, 150)):
        fate.happen()
    for worker in world.nodes:  # the agent repeats its word: at least the newest order reaches everyone in the end
        world.in_flight.append(Sent(worker, OrderSeen(world.orders[-1])))
    world.settle()

    newest = world.orders[-1]
    assert world.members() == set(newest.workers)
    assert {world.nodes[w].machine.current for w in newest.workers} == {newest}
    for worker, node in world.nodes.items():
        assert node.gone or worker in newest.workers, f"worker {worker} waits for ever"
    histories = [world.nodes[worker].history for worker in newest.workers]
    lineage = max(history or () for history in histories)
    assert all(history is not None and lineage[: len(history)] == history for history in histories), "one lineage"
    assert list(lineage) == sorted(lineage), "generations only rise"


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
