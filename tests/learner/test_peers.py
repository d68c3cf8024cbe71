"""Two workers end up connected, whichever of their connections breaks while they connect."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from resile_learner.collectives.poller import LinkPoller
from resile_learner.membership.events import Connect, Event, LinkDown, LinkUp, SendToPeer
from resile_learner.membership.machine import Membership
from resile_learner.messages import Member, Order, WorkerConfig
from resile_learner.worker import links
from resile_learner.worker.peers import PeerConnections
from resile_testing.waiting import PATIENCE_SECONDS, until


class Worker:
    """The connections of one worker, and a membership that carries out its commands at once."""

    def __init__(self, number: int, tasks: asyncio.TaskGroup) -> None:
        config = WorkerConfig(job="j", worker=number, script="s", directory="/", storage="file:///none")
        self.tasks = tasks
        self.membership = Membership(number)
        self.poller = LinkPoller()
        self.events: list[Event] = []
        self.disconnected = asyncio.Event()
        self.started: list[asyncio.Task[None]] = []
        self.peers = PeerConnections(
            config,
            self.poller,
            lambda: self.membership.view,
            handle=self.handle,
            on_entry=lambda _: None,
            report=lambda _: None,
            spawn=self.spawn,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self.tasks.create_task(work)
        self.started.append(task)
        return task

    def handle(self, event: Event) -> None:
        self.events.append(event)
        for command in self.membership.handle(event):
            match command:
                case Connect(member, generation):
                    self.peers.connect(member, generation)
                case SendToPeer(peer, message):
                    self.peers.send(peer, message)
        if isinstance(event, LinkDown):
            self.disconnected.set()

    @property
    def is_linked(self) -> bool:
        changes = [event for event in self.events if isinstance(event, LinkUp | LinkDown)]
        return bool(changes) and isinstance(changes[-1], LinkUp)


async def test_a_control_connection_that_breaks_before_there_is_one_for_data_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dial, accept = links.dial, links.accept
    dialed: list[str] = []
    accepted: list[str] = []
    has_second_data = asyncio.Event()

    async def dial_data_after_the_end_of_control(member: Member, *, kind: links.Kind, **others: Any) -> socket.socket:
        dialed.append(kind)
        if kind == "data":
            await dialer.disconnected.wait()
        return await dial(member, kind=kind, **others)

    async def close_first(sock: socket.socket, **others: Any) -> tuple[int, links.Kind]:
        peer, kind = await accept(sock, **others)
        accepted.append(kind)
        if accepted == ["control"]:
            sock.close()
            raise links.LinkRefused("this one breaks")
        if accepted.count("data") == 2:
            asyncio.get_running_loop().call_soon(has_second_data.set)  # once it is adopted
        return peer, kind

    monkeypatch.setattr(links, "dial", dial_data_after_the_end_of_control)
    monkeypatch.setattr(links, "accept", close_first)
    listener = links.listen("127.0.0.1")
    members = (
        Member(worker=0, host="127.0.0.1", port=listener.getsockname()[1]),
        Member(worker=1, host="127.0.0.1", port=1),
    )
    order = Order(job="j", generation=1, members=members, secret="s", cold_start=True)
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
        acceptor, dialer = Worker(0, tasks), Worker(1, tasks)
        accepting = tasks.create_task(acceptor.peers.accept_all(listener))
        acceptor.peers.on_order(order)
        dialer.peers.on_order(order)
        await has_second_data.wait()
        await until(lambda: acceptor.is_linked and dialer.is_linked)
        assert dialed == ["control", "data"] * 2
        for task in (accepting, *acceptor.started, *dialer.started):
            task.cancel()
    listener.close()
    for worker in acceptor, dialer:
        worker.peers.close()
        worker.poller.close()
