"""What other threads may ask for while the main thread waits, and which links there are."""

import threading
from collections.abc import Callable

import pytest
import torch

from resile_learner.collectives.spec import Tag

from .link_group import PATIENCE_SECONDS, Node, abandoned, check_round, make_work, start, wait


class StoppedError(Exception):
    pass


def test_a_member_that_is_interrupted_aborts_the_round_of_the_others(connect_group) -> None:
    group = connect_group(3)
    work = make_work(3, [100_000])
    group.nodes[0].poller.interrupt(StoppedError())
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)))) for w in range(3)]
    assert isinstance(calls[0].exception(PATIENCE_SECONDS), StoppedError)
    assert [abandoned(call).suspect for call in calls[1:]] == [0, 0]


def test_a_new_link_takes_the_place_of_a_broken_one(connect_group) -> None:
    group = connect_group(2)
    work = make_work(2, [100_000])
    check_round(group, [0, 1], Tag(1, 0), work)
    group.connect(0, 1)
    check_round(group, [0, 1], Tag(1, 1), work)
    assert group.nodes[0].poller.links.keys() == {1}


BLOCKING_CALLS: dict[str, Callable[[Node], object]] = {
    "finish": lambda node: node.run_round(make_work(2, [1000]).spec(0, [0, 1], Tag(1, 0))),
    "receive state": lambda node: node.transfer.receive(lambda skeleton: []),
    "await confirmations": lambda node: node.leave.await_confirmations([1], Tag(1, 0)),
    "close gracefully": lambda node: node.leave.close_gracefully([1]),
    "send state": lambda node: node.transfer.send(1, 1, b"", [torch.zeros(20_000_000)]),
    "wait until": lambda node: node.poller.wait_until(lambda: False),
}


@pytest.mark.parametrize("name", BLOCKING_CALLS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_interrupt_is_raised_by_whatever_blocks(connect_group, name: str, when: str) -> None:
    group = connect_group(2)
    if when == "before":
        group.nodes[0].poller.interrupt(StoppedError())
    call = start(lambda: BLOCKING_CALLS[name](group.nodes[0]))
    if when == "meanwhile":
        group.nodes[0].poller.interrupt(StoppedError())
    assert isinstance(call.exception(PATIENCE_SECONDS), StoppedError)


@pytest.mark.parametrize("name", [name for name in BLOCKING_CALLS if name != "close gracefully"])
def test_links_stay_usable_after_an_interrupt(connect_group, name: str) -> None:
    group = connect_group(2)
    call = start(lambda: BLOCKING_CALLS[name](group.nodes[0]))
    group.nodes[0].poller.interrupt(StoppedError())
    assert isinstance(call.exception(PATIENCE_SECONDS), StoppedError)
    check_round(group, [0, 1], Tag(2, 0), make_work(2, [100_000]))


def test_a_wait_ends_when_its_condition_holds_after_a_wake() -> None:
    node = Node(0)
    ready = threading.Event()
    call = start(lambda: node.poller.wait_until(ready.is_set))
    node.poller.wake()
    assert not call.done() or ready.is_set()
    ready.set()
    node.poller.wake()
    wait([call])
    node.poller.close()
