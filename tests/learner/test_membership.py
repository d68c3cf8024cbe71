"""The generation switch under reordered, doubled and lost messages, without threads, sockets or clocks."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.membership.events import (
    AbandonRound,
    Connect,
    LinkDown,
    LinkUp,
    MessageReceived,
    OrderReceived,
    PauseRequested,
    RoundAbandoned,
    RoundCompleted,
    ScriptReady,
    SendToPeer,
    StateSynced,
    StateSyncRequested,
    Switch,
    SyncState,
    Withdraw,
)
from resile_learner.membership.machine import Membership
from resile_learner.membership.roles import TRANSITIONS, Role
from resile_learner.messages import (
    ActiveGeneration,
    CommittedRound,
    CommittedRounds,
    Heartbeat,
    JoinerReady,
    Order,
    OrderRequest,
)
from resile_shared.recent_events import InternalError

from .membership_world import Fate, order


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_order_of_messages_keeps_one_lineage_and_ends_in_the_newest_generation(seed: int) -> None:
    choices = random.Random(seed)
    fate = Fate(choices, [*["deliver"] * 3, "again", *["step"] * 3, "heartbeat", "order"])
    world = fate.world
    for _ in range(choices.randint(5, 150)):
        fate.happen()
    newest = world.orders[-1]
    informed = choices.choice(sorted(world.members()) or newest.workers)  # the agents of all others are cut off
    world.tell([informed])
    world.settle()
    world.tell(set(world.living()) - world.reachable_from(newest.workers))  # their agents are back in the end
    world.settle()

    assert world.members() == set(newest.workers)
    assert {world.nodes[w].view.current for w in newest.workers} == {newest}
    for worker, node in world.nodes.items():
        assert node.gone or worker in newest.workers, f"worker {worker} waits for ever"
    histories = [world.nodes[worker].history for worker in newest.workers]
    lineage = max(history or () for history in histories)
    assert all(history is not None and lineage[: len(history)] == history for history in histories), "one lineage"
    assert list(lineage) == sorted(lineage), "generations only rise"


def member_of(current: Order, worker: int) -> Membership:
    machine = Membership(worker)
    machine.handle(OrderReceived(current))
    for other in current.workers:
        if other != worker:
            machine.handle(LinkUp(other))
    machine.handle(ScriptReady())
    assert machine.view.current == current
    return machine


def test_a_member_names_a_generation_only_when_its_joiner_is_linked_and_ready() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderReceived(order(2, 0, 1, 2)))
    assert machine.view.named(1) == 1
    machine.handle(LinkUp(2))
    assert machine.view.named(1) == 1
    machine.handle(MessageReceived(2, JoinerReady(generation=2)))
    assert machine.view.named(1) == 2
    machine.handle(LinkDown(2))
    machine.handle(LinkUp(2))
    assert machine.view.named(1) == 1, "a joiner whose links broke may withdraw until it is ready again"
    machine.handle(MessageReceived(2, JoinerReady(generation=2)))
    assert machine.view.named(1) == 2


def test_a_member_knows_whether_it_trains_on_in_the_generation_that_it_names() -> None:
    machine = member_of(order(1, 0, 1), 0)
    assert machine.view.is_member_of(1)
    machine.handle(OrderReceived(order(2, 1)))
    assert machine.view.named(1) == 2
    assert not machine.view.is_member_of(2)
    assert machine.view.is_member_of(1)


def test_headers_that_disagree_change_nothing() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderReceived(order(2, 0)))
    assert machine.view.named(1) == 2
    assert machine.handle(RoundCompleted((2, 1))) == []
    assert machine.view.current == order(1, 0, 1)


def test_old_orders_have_no_effect() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderReceived(order(3, 0)))
    assert machine.handle(OrderReceived(order(2, 0, 1, 5))) == []
    (switch,) = machine.handle(RoundCompleted((3, 3)))
    assert isinstance(switch, Switch)
    assert switch.new == order(3, 0)


def test_a_recovery_that_was_superseded_does_not_begin() -> None:
    """Its order arrives last: nobody else takes part in it any more."""
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderReceived(order(3, 0, 1)))
    machine.handle(RoundCompleted((3, 3)))
    assert machine.view.current == order(3, 0, 1)
    assert machine.handle(OrderReceived(order(2, 0, is_recovery=True))) == []
    assert machine.view.recovery_order is None


def test_nothing_else_is_agreed_on_while_a_recovery_is_ordered() -> None:
    machine = member_of(order(1, 0, 1, 2), 0)
    machine.handle(OrderReceived(order(2, 0, 1)))
    assert machine.view.named(1) == 2
    machine.handle(OrderReceived(order(3, 0, 1, is_recovery=True)))
    assert machine.handle(RoundCompleted((2, 2, 2))) == []
    assert machine.view.current == order(1, 0, 1, 2)


def test_a_connection_that_breaks_is_made_again() -> None:
    machine = member_of(order(1, 0, 1), 1)
    newer = order(2, 0, 1, 2)
    machine.handle(OrderReceived(newer))
    assert machine.handle(LinkDown(0)) == [Connect(newer.members[0], 2)]


def test_a_plan_is_neither_early_nor_late() -> None:
    machine = member_of(order(1, 0, 1, until=10), 0)
    assert not machine.view.must_wait(9)
    assert machine.view.must_wait(10)
    machine.handle(OrderReceived(order(2, 0, not_before=10)))
    assert machine.view.named(9) == 1
    assert machine.view.named(10) == 2
    assert not machine.view.must_wait(10)
    assert not member_of(order(1, 0), 0).view.must_wait(10), "without a plan nobody waits"


def test_a_superseded_joiner_that_was_announced_waits_for_a_member_to_say_so() -> None:
    machine = Membership(2)
    machine.handle(OrderReceived(order(2, 0, 2)))
    machine.handle(ScriptReady())
    assert SendToPeer(0, JoinerReady(generation=2)) in machine.handle(LinkUp(0))
    assert Withdraw() not in machine.handle(OrderReceived(order(3, 0)))
    assert machine.handle(MessageReceived(0, ActiveGeneration(generation=3))) == [Withdraw()]


def test_a_superseded_joiner_that_nobody_counts_on_withdraws_at_once() -> None:
    machine = Membership(2)
    machine.handle(OrderReceived(order(2, 0, 2)))
    assert machine.handle(OrderReceived(order(3, 0)))[-1] == Withdraw()


def test_a_joiner_is_ready_for_no_generation_that_does_not_name_it() -> None:
    machine = Membership(2)
    machine.handle(OrderReceived(order(2, 0, 1, 2)))
    machine.handle(ScriptReady())
    machine.handle(LinkUp(0))
    assert machine.handle(OrderReceived(order(3, 0))) == [Withdraw()], "1 was never reached, so nobody counts on it"


@pytest.mark.parametrize("workers", [(3,), (3, 4)])
def test_leavers_hand_over_when_nobody_continues(workers: tuple[int, ...]) -> None:
    machine = member_of(order(1, 0, 1), 1)
    commands = machine.handle(OrderReceived(order(2, *workers)))
    assert [c.member.worker for c in commands if isinstance(c, Connect)] == list(workers)
    for worker in workers:
        assert machine.view.named(1) == 1
        machine.handle(LinkUp(worker))
        machine.handle(MessageReceived(worker, JoinerReady(generation=2)))
    assert machine.view.named(1) == 2
    (switch,) = machine.handle(RoundCompleted((2, 2)))
    assert isinstance(switch, Switch)
    assert switch.receivers_of(0) == workers[:1]
    assert switch.receivers_of(1) == workers[1:]


def test_a_pause_that_was_meant_for_the_job_before_its_cold_start_is_ignored() -> None:
    machine = Membership(0)
    machine.handle(PauseRequested(1))
    machine.handle(OrderReceived(order(3, 0).model_copy(update={"cold_start": True, "lineage": 2})))
    assert not machine.view.is_pause_requested
    machine.handle(PauseRequested(1))
    assert not machine.view.is_pause_requested
    machine.handle(PauseRequested(2))
    assert machine.view.is_pause_requested


def test_a_member_pauses_when_its_lineage_is_asked_to() -> None:
    machine = member_of(order(1, 0, 1), 0)
    assert not machine.view.is_pause_requested
    machine.handle(PauseRequested(1))
    assert machine.view.is_pause_requested
    machine.handle(OrderReceived(order(2, 0, 1, 2)))
    assert machine.view.is_pause_requested, "a change of the members does not end it"


def test_a_worker_that_has_withdrawn_ignores_what_still_arrives() -> None:
    machine = Membership(2)
    machine.handle(OrderReceived(order(2, 0, 2)))
    machine.handle(LinkUp(0))
    assert machine.handle(OrderReceived(order(3, 0)))[-1] == Withdraw()
    assert machine.handle(OrderReceived(order(4, 0, 2))) == []
    assert machine.handle(LinkDown(0)) == []


def test_an_initial_member_that_learns_first_of_a_recovery_without_it_withdraws() -> None:
    machine = Membership(1)
    machine.handle(ScriptReady())
    machine.handle(LinkUp(0))
    assert Withdraw() not in machine.handle(OrderReceived(order(2, 0, is_recovery=True)))
    assert machine.handle(OrderReceived(order(1, 0, 1))) == [Withdraw()]


def test_a_member_counts_on_all_workers_of_its_generation_and_of_those_that_are_ordered() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(OrderReceived(order(2, 0, 2)))
    assert [machine.counts_on(peer) for peer in (1, 2, 3)] == [True, True, False]
    assert machine.handle(LinkUp(2)) == [SendToPeer(2, Heartbeat(generation=2))]
    assert SendToPeer(3, ActiveGeneration(generation=1)) in machine.handle(LinkUp(3))


def test_the_round_that_a_recovery_interrupts_is_abandoned_because_of_a_worker_that_was_lost() -> None:
    machine = member_of(order(1, 0, 1, 2), 0)
    assert AbandonRound(1, generation=1) in machine.handle(OrderReceived(order(2, 0, 2, is_recovery=True)))


def test_a_state_sync_waits_for_the_links_to_all_survivors() -> None:
    machine = member_of(order(1, 0, 1, 2, 3), 2)
    machine.handle(LinkDown(1))
    machine.handle(RoundAbandoned(4))
    machine.handle(OrderReceived(order(2, 0, 1, 2, is_recovery=True)))
    machine.handle(MessageReceived(0, CommittedRounds(generation=2, round=4, behind=())))
    assert not machine.view.can_sync_state
    machine.handle(LinkUp(1))
    assert machine.view.can_sync_state


def test_rounds_of_an_older_recovery_that_come_late_do_not_replace_those_of_the_newest() -> None:
    machine = member_of(order(1, 0, 1), 1)
    machine.handle(RoundAbandoned(4))
    machine.handle(OrderReceived(order(3, 0, 1, is_recovery=True)))
    machine.handle(MessageReceived(0, CommittedRounds(generation=3, round=4, behind=())))
    machine.handle(MessageReceived(0, CommittedRounds(generation=2, round=3, behind=())))
    assert machine.view.can_sync_state


def test_a_leaver_that_a_recovery_drops_may_exit_and_does_not_recover() -> None:
    machine = member_of(order(1, 0, 1), 1)
    machine.handle(OrderReceived(order(2, 0)))
    machine.handle(RoundCompleted((2, 2)))
    assert not machine.view.is_released, "the others may not have committed its last round"
    machine.handle(OrderReceived(order(3, 0, is_recovery=True)))
    assert machine.view.is_released
    assert not machine.view.must_recover


def test_a_leaver_stays_while_only_its_successors_are_known_to_be_active() -> None:
    """One of them has its last round, and others may not; once a later generation is active, all had it."""
    machine = member_of(order(1, 0, 1), 1)
    machine.handle(OrderReceived(order(2, 0)))
    machine.handle(RoundCompleted((2, 2)))
    machine.handle(MessageReceived(0, ActiveGeneration(generation=2)))
    assert not machine.view.is_released
    machine.handle(MessageReceived(0, ActiveGeneration(generation=3)))
    assert machine.view.is_released


def test_a_worker_changes_its_role_along_the_table_of_transitions() -> None:
    machine = Membership(1)
    roles = [machine.view.role]
    first, second = order(1, 0, 1), order(2, 0)
    recalled = order(3, 1, is_recovery=True)
    for event in (
        OrderReceived(first),
        LinkUp(0),
        ScriptReady(),
        OrderReceived(second),
        RoundCompleted((2, 2)),
        OrderReceived(recalled),
        RoundAbandoned(1),
        StateSynced(3, 1),
        OrderReceived(order(4, 0, is_recovery=True)),
    ):
        machine.handle(event)
        if machine.view.role is not roles[-1]:
            roles.append(machine.view.role)
    assert roles == [Role.NEW, Role.JOINING, Role.MEMBER, Role.LEAVING, Role.MEMBER, Role.WITHDRAWN]
    assert all(new in TRANSITIONS[old] for old, new in pairwise(roles))


def test_an_illegal_transition_raises_with_the_events_that_led_to_it() -> None:
    machine = member_of(order(1, 0, 1), 1)
    machine.handle(OrderReceived(order(2, 0)))
    machine.handle(RoundCompleted((2, 2)))
    with pytest.raises(InternalError) as caught:
        machine.handle(RoundCompleted((2, 2)))
    assert "worker 1 cannot change from leaving to leaving" in caught.value.fault
    assert str(caught.value).count("RoundCompleted(named=(2, 2))") == 2
    assert "secret" not in str(caught.value)


def test_a_state_sync_starts_only_while_no_newer_order_has_arrived() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(RoundAbandoned(4))
    machine.handle(OrderReceived(order(2, 0, 1, is_recovery=True)))
    machine.handle(MessageReceived(1, CommittedRound(generation=2, round=5)))
    assert machine.view.can_sync_state
    newer = order(3, 0, 1, is_recovery=True)
    machine.handle(OrderReceived(newer))
    assert machine.handle(StateSyncRequested()) == [], "the round that was sent for the newer order still holds"
    rounds = CommittedRounds(generation=3, round=5, behind=(0,))
    committed = MessageReceived(1, CommittedRound(generation=3, round=5))
    assert machine.handle(committed) == [SendToPeer(1, rounds)]
    assert machine.handle(StateSyncRequested()) == [SyncState(newer, 5, behind=(0,))]
    assert not machine.view.can_sync_state


def test_a_recovery_that_is_superseded_while_the_state_is_synced_does_not_become_active() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(RoundAbandoned(4))
    machine.handle(OrderReceived(order(2, 0, 1, is_recovery=True)))
    machine.handle(MessageReceived(1, CommittedRound(generation=2, round=4)))
    assert machine.handle(StateSyncRequested())
    machine.handle(OrderReceived(order(3, 0, 1, is_recovery=True)))
    machine.handle(StateSynced(2, 4))
    assert machine.view.current == order(1, 0, 1)
    machine.handle(MessageReceived(1, CommittedRound(generation=3, round=4)))
    assert machine.view.can_sync_state, "the newer recovery begins with the round that was reached"


def test_a_newer_order_is_requested_from_one_linked_peer_at_a_time() -> None:
    machine = member_of(order(1, 0, 1, 2), 0)
    newer = order(3, 0, 1, 2)
    assert machine.handle(MessageReceived(7, Heartbeat(generation=3))) == [], "a peer that is not linked answers nobody"
    assert machine.handle(MessageReceived(1, Heartbeat(generation=3))) == [SendToPeer(1, OrderRequest())]
    assert machine.handle(MessageReceived(2, Heartbeat(generation=3))) == []
    machine.handle(LinkDown(2))
    machine.handle(LinkUp(2))
    assert machine.handle(MessageReceived(2, Heartbeat(generation=3))) == [], "the one that was asked is still linked"
    machine.handle(LinkDown(1))
    assert machine.handle(MessageReceived(2, Heartbeat(generation=3))) == [SendToPeer(2, OrderRequest())]
    machine.handle(OrderReceived(newer))
    assert machine.handle(MessageReceived(2, OrderRequest())) == [SendToPeer(2, newer)]
    assert machine.handle(MessageReceived(2, Heartbeat(generation=3))) == []


def test_the_rounds_of_a_recovery_are_decided_once_and_sent_again_over_a_new_link() -> None:
    machine = member_of(order(1, 0, 1), 0)
    machine.handle(RoundAbandoned(5))
    machine.handle(MessageReceived(1, CommittedRound(generation=2, round=4)))
    machine.handle(OrderReceived(order(3, 0, 1, is_recovery=True)))
    assert not machine.view.can_sync_state, "what was sent for an older recovery may not hold any more"
    rounds = SendToPeer(1, CommittedRounds(generation=3, round=5, behind=(1,)))
    assert machine.handle(MessageReceived(1, CommittedRound(generation=3, round=4))) == [rounds]
    assert machine.handle(StateSyncRequested())
    machine.handle(StateSynced(3, 5))
    machine.handle(LinkDown(1))
    machine.handle(RoundAbandoned(6))
    machine.handle(MessageReceived(1, CommittedRound(generation=3, round=6)))
    assert rounds in machine.handle(LinkUp(1))
