"""A communicator never leaves anyone waiting for a library's call that does not return, nor its memory in use."""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from resile_learner.collectives.device import communicators
from resile_learner.collectives.device.communicator import Communicator, Condition, Task
from resile_learner.collectives.device.communicators import Communicators
from resile_learner.collectives.device.process_group import DeviceGroup as Group
from resile_learner.collectives.device.process_group import Operand

from .link_group import PATIENCE_SECONDS


class QueueingGroup:
    """As NCCL's: calls return at once, what they have queued ends only when it is aborted, which takes a while."""

    rank = 0
    has_released_memory = False

    def __init__(self) -> None:
        self.is_aborting = threading.Event()
        self.may_abort = threading.Event()
        self.is_aborted = False

    def exchange(self, sends: Sequence[Operand], receives: Sequence[Operand]) -> None:
        pass

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        pass

    def error(self) -> str:
        return ""

    def abort(self) -> None:
        assert not self.is_aborted
        self.is_aborting.set()
        assert self.may_abort.wait(PATIENCE_SECONDS)
        self.is_aborted = True


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What keeps threads of a test waiting, set at its end."""
    event = threading.Event()
    yield event
    event.set()


def _start(form: object, *, forming_seconds: float = PATIENCE_SECONDS) -> tuple[Communicator, threading.Event]:
    changed = threading.Event()
    return Communicator("test", form, changed.set, forming_seconds=forming_seconds), changed  # type: ignore[arg-type]


def test_an_idle_one_is_aborted_before_its_memory_is_used_again() -> None:
    """Between two buckets its thread waits for the next, and the device still works at what was queued."""
    group = QueueingGroup()
    communicator, _ = _start(lambda on_group: group)
    communicator.await_forming(PATIENCE_SECONDS)
    done = threading.Event()
    communicator.submit(lambda group: done.set())
    assert done.wait(PATIENCE_SECONDS)
    communicator.abandon("a round was abandoned")
    assert group.is_aborting.wait(PATIENCE_SECONDS)
    assert not communicator.await_end(0.2)
    group.may_abort.set()
    assert communicator.await_end(PATIENCE_SECONDS)
    assert group.is_aborted


def test_a_group_that_has_failed_is_aborted_too() -> None:
    group = QueueingGroup()
    group.may_abort.set()
    communicator, _ = _start(lambda on_group: group)

    def fail(_: Group) -> None:
        raise RuntimeError("an uncorrectable ECC error\nand a trace")

    communicator.submit(fail)
    assert communicator.await_end(PATIENCE_SECONDS)
    assert (group.is_aborted, communicator.reason) == (True, "an uncorrectable ECC error")


def test_a_call_that_never_returns_does_not_keep_a_generation_from_forming(released: threading.Event) -> None:
    """NCCL waits for its peers without a limit, for instance behind a firewall."""

    def form(on_group: Task) -> Group:
        released.wait(PATIENCE_SECONDS)
        raise RuntimeError("too late")

    communicator, changed = _start(form, forming_seconds=0.1)
    assert changed.wait(PATIENCE_SECONDS)
    assert communicator.condition is Condition.ENDED
    assert communicator.reason == "the devices were not connected within 0.1 seconds"


def test_one_that_has_formed_has_no_deadline() -> None:
    group = QueueingGroup()
    group.may_abort.set()
    communicator, _ = _start(lambda on_group: group, forming_seconds=0.2)
    communicator.await_forming(PATIENCE_SECONDS)
    threading.Event().wait(0.4)
    assert communicator.condition is Condition.READY
    communicator.abandon("the test is over")


def test_a_member_that_waits_for_the_probe_of_another_ends_with_its_generation(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first operation would otherwise wait on the device for ever, if the other was lost since they connected."""
    probe = communicators._probe
    waits = threading.Event()

    def probe_late(group: Group, size: int, device: torch.device) -> None:
        if group.rank == 1:
            released.wait(PATIENCE_SECONDS)
        waits.set()
        probe(group, size, device)

    monkeypatch.setattr(communicators, "_probe", probe_late)
    nodes: list[Communicators] = []

    def send(workers: Sequence[int], generation: int, key: str, value: bytes) -> None:
        for worker in workers:
            nodes[worker].receive(generation, key, value)

    nodes += [Communicators(w, host="127.0.0.1", send=send, notify=lambda: None) for w in (0, 1)]  # type: ignore[arg-type]
    for node in nodes:
        node.enable(torch.device("cpu"))
        node.want({1: (0, 1)})
    waiting = nodes[0].of(1)
    assert waiting is not None
    assert waits.wait(PATIENCE_SECONDS)
    nodes[0].want({})
    assert waiting.await_end(PATIENCE_SECONDS)
    nodes[1].close()
