"""Workers in one thread whose links move bytes when a schedule says so: every order of events can be tried.

Each worker is a greenlet that runs until it waits for its links. Nothing sleeps, and nothing depends on time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from unittest import mock

from greenlet import getcurrent, greenlet

from resile_learner.collectives.layout import layout
from resile_learner.collectives.memory_agreement import MemoryAgreement
from resile_learner.collectives.transport import Traffic

from .link_group import Node

PAYLOAD_BYTES = 1024
DIRECT_BYTES = 128
SOCKET_BYTES = 2500  # what a link holds: two frames and a part of the next, as with sockets


@contextmanager
def small_blocks() -> Iterator[None]:
    """Cut buckets into blocks of at most 1 KiB, so that little memory has many, and each order costs little time."""
    layout.cache_clear()
    with (
        mock.patch("resile_learner.collectives.layout.ROUND_PAYLOAD_BYTES", PAYLOAD_BYTES),
        mock.patch("resile_learner.collectives.blocks.ROUND_PAYLOAD_BYTES", PAYLOAD_BYTES),
        mock.patch("resile_learner.collectives.layout.DIRECT_BYTES", DIRECT_BYTES),
    ):
        yield
    layout.cache_clear()


class Deadlock(AssertionError):
    """Everybody waits, and nothing is on its way."""


class Wire:
    """One direction of a link."""

    def __init__(self, sender: int, receiver: int) -> None:
        self.sender = sender
        self.receiver = receiver
        self.in_flight = bytearray()
        self.arrived = bytearray()
        self.is_closed = False
        """Its sender will send nothing more."""
        self.weight = 1.0
        """How often bytes move, beside other wires."""


class WireTransport:
    """Implements `Transport` over two wires."""

    def __init__(self, outward: Wire, inward: Wire) -> None:
        self._outward = outward
        self._inward = inward

    def fileno(self) -> int:
        return -1

    def send(self, buffers: Sequence[bytes | memoryview], /) -> int:
        if self._outward.is_closed or self._inward.is_closed:
            raise BrokenPipeError("Broken pipe")
        room = SOCKET_BYTES - len(self._outward.in_flight) - len(self._outward.arrived)
        if room <= 0:
            raise BlockingIOError
        taken = b"".join(buffers)[:room]
        self._outward.in_flight += taken
        return len(taken)

    def receive(self, buffers: Sequence[memoryview], /) -> int:
        if not self._inward.arrived:
            if self._inward.is_closed and not self._inward.in_flight:
                return 0
            raise BlockingIOError
        received = 0
        for buffer in buffers:
            part = self._inward.arrived[: len(buffer)]
            buffer[: len(part)] = part
            del self._inward.arrived[: len(part)]
            received += len(part)
        return received

    def unacknowledged_seconds(self) -> float:
        return 0.0

    def traffic(self) -> Traffic:
        return Traffic()

    def write_eof(self) -> None:
        self._outward.is_closed = True

    def abort(self) -> None:
        self._outward.is_closed = True

    def close(self) -> None:
        self._outward.is_closed = True


class Schedule:
    """Runs calls of workers, one for each, and moves bytes between them in an order drawn from ``seed``."""

    def __init__(self, num_nodes: int, agreement: Callable[[int], MemoryAgreement], seed: int) -> None:
        self._random = random.Random(seed)
        self.nodes = [Node(worker, agreement(worker)) for worker in range(num_nodes)]
        self.wires = {ends: Wire(*ends) for ends in permutations(range(num_nodes), 2)}
        for wire in self.wires.values():
            wire.weight = 10 ** self._random.uniform(-3, 0)
        for one, other in self.wires:
            transport = WireTransport(self.wires[one, other], self.wires[other, one])
            self.nodes[one].poller.add(other, transport)
        for worker, node in enumerate(self.nodes):
            node.poller.wait = partial(self._wait, worker)  # type: ignore[method-assign]
        self._waiting: dict[int, bool] = {}
        """Workers that wait, and whether they do so for a limited time."""
        self._running: dict[int, greenlet] = {}
        self._results: dict[int, object] = {}
        self.stopped: set[int] = set()

    @property
    def running(self) -> set[int]:
        """The workers whose calls have not returned."""
        return set(self._running)

    def _wait(self, worker: int, *, timeout_ms: int | None = None) -> bool:
        self._waiting[worker] = timeout_ms is not None
        return bool(getcurrent().parent.switch())

    def pause(self, worker: int) -> None:
        """Let others go on, in the call of ``worker``."""
        self.nodes[worker].poller.wait(timeout_ms=0)

    def run(
        self, calls: dict[int, Callable[[], object]], on_step: Callable[[int], None] = lambda step: None
    ) -> dict[int, object]:
        """What each call returned, or the exception that it raised; not those of workers that were stopped."""
        self._results = {}
        self._running = {worker: greenlet(self._caught(worker, call)) for worker, call in calls.items()}
        for worker in list(self._running):
            self._resume(worker, True)
        for step in self._steps():
            on_step(step)
        return self._results

    def _caught(self, worker: int, call: Callable[[], object]) -> Callable[[object], None]:
        def run(_: object) -> None:
            try:
                self._results[worker] = call()
            except Exception as error:
                self._results[worker] = error
            del self._running[worker]

        return run

    def _steps(self) -> Iterator[int]:
        step = 0
        while self._running.keys() - self.stopped:
            yield step
            step += 1
            wires = [wire for wire in self.wires.values() if self._can_move(wire)]
            if wires:
                (wire,) = self._random.choices(wires, [wire.weight for wire in wires])
                self._move(wire)
                continue
            limited = [worker for worker in self._running if self._waiting.get(worker) and worker not in self.stopped]
            if not limited and self._running.keys() - self.stopped:
                raise Deadlock(f"workers {sorted(self._running.keys() - self.stopped)} wait for nothing")
            for worker in self._random.sample(limited, k=min(1, len(limited))):
                self._resume(worker, False)

    def _can_move(self, wire: Wire) -> bool:
        """Whether its receiver can notice something new."""
        link = self.nodes[wire.receiver].poller.links.get(wire.sender)
        if wire.receiver in self.stopped or link is None:
            return False
        is_news = bool(wire.in_flight or wire.arrived) or wire.is_closed
        is_heard = link.receiving and not link.paused and wire.receiver in self._running
        return bool(wire.in_flight) or (is_news and is_heard)

    def _move(self, wire: Wire) -> None:
        num_bytes = self._random.choice([100, SOCKET_BYTES])
        wire.arrived += wire.in_flight[:num_bytes]
        del wire.in_flight[:num_bytes]
        for worker, peer in ((wire.receiver, wire.sender), (wire.sender, wire.receiver)):
            link = self.nodes[worker].poller.links.get(peer)
            if link is not None and worker not in self.stopped:
                link.readable = link.writable = True
                self._resume(worker, True)

    def _resume(self, worker: int, is_ready: bool) -> None:
        if worker in self._running:
            self._waiting.pop(worker, None)
            self._running[worker].switch(is_ready)

    def wake(self, worker: int) -> None:
        """Let a worker look at what other threads have asked of it."""
        self._resume(worker, True)

    def kill(self, worker: int) -> None:
        """It does nothing more, and its connections are closed."""
        self.stopped.add(worker)
        for (sender, _), wire in self.wires.items():
            if sender == worker:
                wire.is_closed = True

    def freeze(self, worker: int) -> None:
        """It does nothing more."""
        self.stopped.add(worker)

    def cut(self, worker: int) -> None:
        """Nothing moves to or from it any more, and what was on its way is lost."""
        self.stopped.add(worker)
        for ends, wire in self.wires.items():
            if worker in ends:
                wire.in_flight.clear()

    def close(self) -> None:
        for node in self.nodes:
            node.poller.close()
            if node.agreement is not None:
                node.agreement.close()
