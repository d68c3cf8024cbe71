"""The two threads of a worker: commands keep the order of the decisions, and each method has its thread."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from resile_learner.collectives.poller import LinkPoller
from resile_learner.membership.events import (
    LinkUp,
    MessageReceived,
    OrderReceived,
    RoundAbandoned,
    RoundCompleted,
    ScriptReady,
    StateSynced,
    StateSyncRequested,
)
from resile_learner.messages import (
    CommittedRound,
    Finished,
    Member,
    Order,
    OrderRequest,
    Pause,
    PeerMessage,
    PeerSuspected,
    WorkerConfig,
    WorkerListening,
    encode,
    from_peer,
    from_worker,
)
from resile_learner.worker import links
from resile_learner.worker.control import Withdrawn
from resile_learner.worker.control_thread import ControlThread
from resile_shared.recent_events import InternalError


class SlowToWake(LinkPoller):
    """Takes its time where the control thread has published a decision and not yet carried it out."""

    def wake(self) -> None:
        super().wake()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)


class Scene:
    """The control thread of worker 0; the test is its main thread, its agent and its peer, worker 1."""

    def __init__(self) -> None:
        config = WorkerConfig(
            job="j", worker=0, script="s", directory="/", storage="file:///none", detection_seconds=60
        )
        self.agent, theirs = socket.socketpair()
        self.thread = ControlThread(config, theirs, SlowToWake())
        self.control = self.thread.control
        self.thread.start()
        self.reports = self.agent.makefile("rb")
        hello = from_worker.validate_json(self.reports.readline())
        assert isinstance(hello, WorkerListening)
        self.members = Member(worker=0, host=hello.host, port=hello.port), Member(worker=1, host="127.0.0.1", port=1)

    def order(self, generation: int, *, num_members: int = 2) -> Order:
        return Order(
            job="j",
            generation=generation,
            members=self.members[:num_members],
            secret="s",
            cold_start=generation == 1,
            is_recovery=generation > 1,
        )

    def send(self, message: Order | Pause) -> None:
        self.agent.sendall(encode(message))

    def close_agent(self) -> None:
        """Read until the worker sends no more, then close, as agents do."""
        while self.agent.recv(65536):
            pass
        self.agent.close()

    async def dial(self) -> asyncio.StreamReader:
        """Connect as worker 1; the data connection stays open as long as the reader of the control connection."""
        control, self.data = [
            await links.dial(self.members[0], job="j", worker=1, generation=1, secret="s", kind=kind)
            for kind in links.KINDS
        ]
        reader, self.writer = await asyncio.open_connection(sock=control)
        return reader


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    closing = threading.Thread(target=scene.close_agent)
    closing.start()
    scene.thread.stop()
    closing.join()


def test_what_is_flushed_reaches_the_agent_though_the_process_ends_at_once(scene: Scene) -> None:
    scene.control._call(time.sleep, 0.3)
    scene.control.report(Finished(worker=0))
    scene.control.flush()
    scene.agent.setblocking(False)
    assert from_worker.validate_json(scene.agent.recv(65536)) == Finished(worker=0)
    scene.agent.setblocking(True)


class WatchedListener(socket.socket):
    """Says whether an event loop still watched its descriptor when it was closed."""

    loop: asyncio.AbstractEventLoop
    was_watched = False

    def close(self) -> None:
        if self.fileno() >= 0:
            self.was_watched = self.loop.remove_reader(self.fileno())
        super().close()


def test_a_listener_is_not_watched_any_more_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor may be that of a new connection at once."""
    listeners: list[WatchedListener] = []

    def listen(host: str) -> WatchedListener:
        listener = WatchedListener(fileno=socket.create_server((host, 0)).detach())
        listener.setblocking(False)
        listener.loop = asyncio.get_running_loop()
        listeners.append(listener)
        return listener

    monkeypatch.setattr(links, "listen", listen)
    scene = Scene()
    closing = threading.Thread(target=scene.close_agent)
    closing.start()
    scene.thread.stop()
    closing.join()
    (listener,) = listeners
    assert listener.fileno() < 0
    assert not listener.was_watched


async def read_until(reader: asyncio.StreamReader, last: PeerMessage) -> list[PeerMessage]:
    messages: list[PeerMessage] = []
    while last not in messages:
        messages.append(from_peer.validate_json(await reader.readline()))
    return messages


async def test_a_peer_receives_what_either_thread_decides_in_the_order_of_the_decisions(scene: Scene) -> None:
    scene.send(scene.order(1))
    reader = await scene.dial()
    assert scene.control.post(ScriptReady()) is None
    scene.control.wait_for(lambda view: view.current)

    scene.control.post(RoundAbandoned(5))
    recovery = scene.order(2).model_copy(update={"members": scene.members[::-1]})
    scene.send(recovery)
    scene.control.wait_for(lambda view: view.recovery_order)
    scene.control.post(MessageReceived(1, OrderRequest()))

    assert CommittedRound(generation=2, round=5) in await read_until(reader, recovery)
    scene.writer.close()
    scene.data.close()


def test_a_suspicion_names_the_generation_that_it_is_of_even_if_it_is_reported_after_the_recovery(scene: Scene) -> None:
    lost = Member(worker=2, host="127.0.0.1", port=1)
    initial = scene.order(1).model_copy(update={"members": (*scene.members, lost)})
    for event in (OrderReceived(initial), LinkUp(1), LinkUp(2), ScriptReady()):
        scene.control.post(event)
    turn = threading.Event()
    scene.control._call(turn.wait)  # the control thread gets no turn until the recovery has ended
    scene.control.post(OrderReceived(scene.order(2)))
    scene.control.post(MessageReceived(1, CommittedRound(generation=2, round=7)))

    scene.control.report_suspect(2, "broken link", "connection closed")
    for recovery_step in (RoundAbandoned(7), StateSyncRequested(), StateSynced(2, 7)):
        scene.control.post(recovery_step)
    assert scene.control.view.current == scene.order(2)
    turn.set()

    suspicion = from_worker.validate_json(scene.reports.readline())
    assert isinstance(suspicion, PeerSuspected)
    assert (suspicion.suspect, suspicion.generation) == (2, 1)


def test_a_view_does_not_change_while_the_membership_does(scene: Scene) -> None:
    before = scene.control.view
    scene.send(scene.order(1, num_members=1))
    scene.control.post(ScriptReady())
    assert scene.control.wait_for(lambda view: view.current) == scene.order(1, num_members=1)
    scene.send(Pause(lineage=1))
    scene.control.wait_for(lambda view: view.is_pause_requested or None)
    assert (before.current, before.is_pause_requested) == (None, False)


def test_what_stops_the_control_thread_is_raised_where_the_main_thread_waits(scene: Scene) -> None:
    scene.control.post(RoundAbandoned(0))
    with pytest.raises(InternalError, match=r"AssertionError(.|\n)*RoundAbandoned\(round=0\)\n  RoundCompleted"):
        scene.control.post(RoundCompleted((1,)))  # this worker is no member yet
    with pytest.raises(InternalError):
        scene.control.wait_for(lambda view: view)


def test_a_dropped_member_withdraws(scene: Scene) -> None:
    scene.send(scene.order(1, num_members=1))
    scene.control.post(ScriptReady())
    scene.control.wait_for(lambda view: view.current)
    scene.send(scene.order(2).model_copy(update={"members": scene.members[1:]}))
    with pytest.raises(Withdrawn):
        scene.control.wait_for(lambda _: None)


async def test_a_method_of_the_main_thread_refuses_another_thread(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="post belongs to the main thread"):
        await asyncio.to_thread(scene.control.post, ScriptReady())
    with pytest.raises(AssertionError, match="_send_to_agent belongs to the control thread"):
        scene.control._send_to_agent(Pause(lineage=1))
