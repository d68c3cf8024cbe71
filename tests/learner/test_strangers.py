"""A worker's port is open to its network: what strangers do there costs the strangers, and peers still get in."""

import asyncio
import json
import os
import re
import resource
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson
import pytest
import pytest_asyncio

from resile_learner.collectives.poller import LinkPoller
from resile_learner.membership.events import ScriptReady
from resile_learner.messages import GrowthRefused, Member, Order, WorkerConfig, WorkerListening, encode, from_worker
from resile_learner.worker import links
from resile_learner.worker.control_thread import ControlThread
from resile_learner.worker.handshakes import MAX_HANDSHAKES

NUM_IDLE = 1100
OPENING = {"job": "j", "dialer": 1, "acceptor": 0, "generation": 1, "kind": "control", "nonce": "0" * 32}


class Victim:
    """The control thread of worker 0, with a real listener; the test is its agent, its peer and the strangers."""

    def __init__(self) -> None:
        config = WorkerConfig(
            job="j", worker=0, script="s", directory="/", storage="file:///none", detection_seconds=60
        )
        self.sockets: list[socket.socket] = []
        self.agent, theirs = socket.socketpair()
        self.thread = ControlThread(config, theirs, LinkPoller())
        self.control = self.thread.control
        self.thread.start()
        hello = from_worker.validate_json(self.agent.makefile("rb").readline())
        assert isinstance(hello, WorkerListening)
        self.address = hello.host, hello.port
        self.members = Member(worker=0, host=hello.host, port=hello.port), Member(worker=1, host="127.0.0.1", port=1)
        order = Order(job="j", generation=1, members=self.members, secret="s", cold_start=True)
        self.agent.sendall(encode(order))
        self.control.wait_for(lambda view: view.first_order)

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(self.address, timeout=10, source_address=(source, 0))

    def opens_with(self, body: bytes) -> bytes:
        """Send one handshake message; return all that is answered until the worker closes the connection."""
        return self.sends(struct.pack(">I", len(body)) + body)

    def sends(self, data: bytes) -> bytes:
        with self.connect() as stranger:
            answer = b""
            with suppress(OSError):  # closed before all of it was read
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while more := stranger.recv(4096):
                    answer += more
            return answer

    async def peer_joins(self) -> None:
        """Worker 1 links itself to the worker, which becomes a member with it."""
        for kind in links.KINDS:
            self.sockets.append(
                await links.dial(self.members[0], job="j", worker=1, generation=1, secret="s", kind=kind)
            )
        self.control.post(ScriptReady())
        await asyncio.to_thread(self._wait_for_membership)

    def _wait_for_membership(self) -> None:
        with self.control._changed:
            assert self.control._changed.wait_for(lambda: self.control._fault or self.control.view.current, timeout=60)
        assert self.control._fault is None

    def wait_for_fault(self) -> None:
        with self.control._changed:
            assert self.control._changed.wait_for(lambda: self.control._fault, timeout=60)
            assert self.control._fault is not None
            raise self.control._fault

    def close(self) -> None:
        def close_agent() -> None:
            while self.agent.recv(65536):
                pass
            self.agent.close()

        closing = threading.Thread(target=close_agent)
        closing.start()
        self.thread.stop()
        closing.join()
        for sock in self.sockets:
            sock.close()


@pytest_asyncio.fixture
async def victim() -> AsyncIterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


@contextmanager
def descriptors(soft: int) -> Iterator[None]:
    """Let this process have ``soft`` open files for a while."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, limits[1]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "opening",
    [
        OPENING | {"dialer": 1 << 64},
        OPENING | {"dialer": -1},
        OPENING | {"generation": 1 << 64},
        OPENING | {"generation": 10**2000},
        OPENING | {"nonce": "\u00e9"},
        OPENING | {"nonce": "0" * 4000},
        OPENING | {"job": "j" * 4000},
        OPENING | {"kind": "other"},
        OPENING | {"dialer": 2},
        OPENING | {"dialer": 0},
    ],
    ids=lambda opening: str(opening)[:60],
)
async def test_an_opening_that_no_member_sends_is_not_answered(victim: Victim, opening: dict[str, Any]) -> None:
    assert await asyncio.to_thread(victim.opens_with, json.dumps(opening).encode()) == b""
    await victim.peer_joins()


async def test_a_proof_of_any_text_is_refused_and_costs_nobody_but_its_sender(victim: Victim) -> None:
    opening, proof = (orjson.dumps(message) for message in (OPENING, {"proof": "\u00e9" * 64}))
    data = b"".join(struct.pack(">I", len(body)) + body for body in (opening, proof))
    assert b"nonce" in await asyncio.to_thread(victim.sends, data)
    await victim.peer_joins()


async def test_what_a_listener_answers_costs_nobody_but_the_link(victim: Victim) -> None:
    """A stranger that listens where a member was once expected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        member = Member(worker=3, host="127.0.0.1", port=listener.getsockname()[1])
        dialing = asyncio.create_task(links.dial(member, job="j", worker=7, generation=1, secret="s", kind="data"))
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        body = orjson.dumps({"nonce": "n", "proof": "\u00e9"})
        await asyncio.get_running_loop().sock_sendall(sock, struct.pack(">I", len(body)) + body)
        with pytest.raises(links.LinkRefused):
            await dialing
        sock.close()


async def test_a_peer_joins_while_idle_connections_come_in(victim: Victim) -> None:
    num_before = len(os.listdir("/proc/self/fd"))
    with descriptors(soft=1 << 20):
        idle = await asyncio.to_thread(lambda: [victim.connect() for _ in range(NUM_IDLE)])
        await victim.peer_joins()
        num_opened = len(os.listdir("/proc/self/fd")) - num_before
        assert num_opened < NUM_IDLE + MAX_HANDSHAKES + 100, "the oldest ones were closed"
        for stranger in idle:
            stranger.close()


async def test_connections_of_one_address_do_not_keep_out_another(victim: Victim) -> None:
    slow = victim.connect()
    idle = await asyncio.to_thread(lambda: [victim.connect("127.0.0.2") for _ in range(MAX_HANDSHAKES + 20)])
    body = orjson.dumps(OPENING)
    slow.sendall(struct.pack(">I", len(body)) + body)
    assert b"nonce" in await asyncio.to_thread(slow.recv, 4096)
    for stranger in [slow, *idle]:
        stranger.close()


async def test_who_does_not_open_a_handshake_is_disconnected(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "OPENING_SECONDS", 0.1)
    with victim.connect() as stranger:
        assert await asyncio.to_thread(stranger.recv, 1) == b""


async def test_a_peer_joins_once_there_are_descriptors_again(victim: Victim) -> None:
    idle = [socket.socket() for _ in range(50)]
    lowest = os.dup(0)
    os.close(lowest)
    with descriptors(soft=lowest + 3):
        for stranger in idle:
            stranger.connect(victim.address)
        await asyncio.sleep(0.5)  # the worker has run out of descriptors
    for stranger in idle:
        stranger.close()
    await victim.peer_joins()


async def test_nothing_is_kept_of_generations_that_strangers_name(victim: Victim) -> None:
    strangers = [victim.connect() for _ in range(100)]
    for number, stranger in enumerate(strangers):
        body = orjson.dumps(OPENING | {"generation": 1000 + number})
        stranger.sendall(struct.pack(">I", len(body)) + body)
    for stranger in strangers:
        stranger.close()
    await victim.peer_joins()
    assert len(victim.control._peers.generations) == 1


async def test_a_worker_that_cannot_have_enough_connections_refuses_to_grow_and_says_which_limit_to_raise(
    victim: Victim,
) -> None:
    many = tuple(Member(worker=number, host="127.0.0.1", port=1) for number in range(200))
    order = Order(job="j", generation=2, members=many, secret="s")
    victim.agent.settimeout(60)
    reading = victim.agent.makefile("rb")
    with descriptors(soft=300):
        victim.agent.sendall(encode(order))
        refused = from_worker.validate_json(await asyncio.to_thread(reading.readline))
    assert isinstance(refused, GrowthRefused)
    assert refused.generation == 2
    assert 1 <= refused.most_workers < 60  # fewer if other tests have left files open
    assert re.search(r"200 workers.* 300 files.*raise the hard limit", refused.message)
    await victim.peer_joins()


async def test_a_worker_that_can_open_no_file_at_all_refuses_to_grow_and_goes_on(victim: Victim) -> None:
    many = tuple(Member(worker=number, host="127.0.0.1", port=1) for number in range(200))
    victim.agent.settimeout(60)
    reading = victim.agent.makefile("rb")
    with descriptors(soft=3):
        victim.agent.sendall(encode(Order(job="j", generation=2, members=many, secret="s")))
        refused = from_worker.validate_json(await asyncio.to_thread(reading.readline))
    assert isinstance(refused, GrowthRefused)
    assert refused.most_workers == 1
    await victim.peer_joins()
