"""Gangs in worlds: the product's worker of a gang, with a script that needs its peers, as collectives do.

The script begins once all of its gang have, and completes when all have trained long enough. When a peer's process dies
it raises, or waits forever, as torch.distributed does.
"""

import random
import socket
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from greenlet import GreenletExit

from resile_learner.worker import gang

from .loop import Process
from .sockets import Replacing, SimSocket, simulated_os
from .threads import SimThreading
from .training import SimScript

LOOK_SECONDS = 0.2
FOREVER = 1e9


class GangScript:
    """The script of worker ``number`` in a gang of ``workers``: together they train what ``script`` says."""

    def __init__(self, process: Process, number: int, *, workers: tuple[int, ...], script: SimScript) -> None:
        self.has_finished = False
        self._process = process
        self._number = number
        self._workers = workers
        self._script = script

    @property
    def is_broken(self) -> bool:
        """Whether its process ended before it had finished."""
        return self._process.is_dead and not self.has_finished

    def run(self, scripts: dict[int, "GangScript"], threads: SimThreading, rng: random.Random) -> None:
        """Train with the ``scripts`` of its gang. Raises RuntimeError."""
        threads.sleep(self._script.import_seconds * (0.5 + rng.random()))
        scripts[self._number] = self
        left = self._script.iterations * self._script.num_shards * self._script.shard_seconds / len(self._workers)
        while left > 0:
            threads.sleep(LOOK_SECONDS)
            peers = [scripts.get(number) for number in self._workers]
            if any(peer is not None and peer.is_broken for peer in peers):
                if rng.random() < 0.5:
                    raise RuntimeError("connection closed by peer")
                threads.sleep(FOREVER)
            if all(peers):
                left -= LOOK_SECONDS
        self.has_finished = True


def replacements(
    threads: SimThreading, exit_process: Any, *, run_script: Any, set_variables: Any
) -> list[tuple[Any, str, Any]]:
    """What the worker of a gang gets in place of threads, sockets, its process and its script."""
    return [
        (gang, "threading", threads),
        (gang, "os", Replacing(simulated_os(exit_process), environ={})),
        (gang, "torch", Replacing(torch, set_num_threads=lambda _: None)),
        (gang, "sys", types.SimpleNamespace(stdout=_Stream(), stderr=_Stream())),
        (gang, "_reserve_port", _reserve_port),
        (gang, "_set_variables", set_variables),
        (gang, "finish_script", lambda: None),
        (gang, "run_script", run_script),
    ]


class BlockingSocket:
    """A simulated connection, for a thread that blocks on it."""

    def __init__(self, threads: SimThreading, sock: SimSocket) -> None:
        self._threads = threads
        self._sock = sock
        self._pending = b""

    def setblocking(self, flag: bool) -> None:
        assert flag

    def makefile(self, mode: str) -> "BlockingSocket":
        assert mode == "rb"
        return self

    def sendall(self, data: bytes) -> None:
        if self._sock.process.is_dead:  # its threads are being reaped
            raise GreenletExit
        self._sock.write(data)

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_WR
        self._sock.shutdown(how)

    def readline(self) -> bytes:
        """Return the next line, or what is left at the end."""
        me = self._threads.running()
        while b"\n" not in self._pending:
            try:
                data = self._sock.read(1 << 16)
            except BlockingIOError:
                self._sock.on_change = me.wake
                me.park()
                self._sock.on_change = None
                continue
            if not data:
                line, self._pending = self._pending, b""
                return line
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line + b"\n"


class _Stream:
    def flush(self) -> None:
        pass


@contextmanager
def _reserve_port(host: str) -> Iterator[Any]:
    yield types.SimpleNamespace(getsockname=lambda: (host, 29500))
