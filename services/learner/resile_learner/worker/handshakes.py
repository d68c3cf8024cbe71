"""Accepts the connections of peers; each may be a stranger's until its handshake is complete.

At most `MAX_HANDSHAKES` incomplete ones are open. When one more arrives, the oldest of the address that has the most is
closed, so that idle connections keep no peer out. A peer whose connection is closed dials again.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from . import links

MAX_HANDSHAKES = 256
PAUSE_SECONDS = 0.1

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
Adopt = Callable[[int, links.Kind, socket.socket], Coroutine[Any, Any, None]]


class Handshakes:
    """The handshakes under way on the connections that worker ``worker`` accepted; ``adopt`` gets those that succeed.

    A failure of ``adopt`` is this worker's own.
    """

    def __init__(
        self, *, job: str, worker: int, credentials_of: links.CredentialsOf, adopt: Adopt, spawn: Spawn
    ) -> None:
        self._job = job
        self._worker = worker
        self._credentials_of = credentials_of
        self._adopt = adopt
        self._spawn = spawn
        self._open: dict[socket.socket, tuple[str, asyncio.Task[None]]] = {}  # oldest first

    async def accept_all(self, listener: socket.socket) -> None:
        """Accept connections until ``listener`` is closed."""
        loop = asyncio.get_running_loop()
        while listener.fileno() >= 0:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # of a connection that has broken already, or there is no descriptor for it
                self._close_oldest()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self._open) >= MAX_HANDSHAKES:
                self._close_oldest()
            self._open[sock] = address[0], self._spawn(self._run(sock))

    async def _run(self, sock: socket.socket) -> None:
        try:
            peer, kind = await links.accept(
                sock, job=self._job, worker=self._worker, credentials_of=self._credentials_of
            )
        except links.LinkRefused:
            return  # a stranger, or a peer that disconnected: neither is this worker's failure
        finally:
            self._open.pop(sock, None)
        await self._adopt(peer, kind, sock)

    def _close_oldest(self) -> None:
        if self._open:
            counts = Counter(address for address, _ in self._open.values())
            busiest = max(counts, key=counts.__getitem__)
            sock = next(sock for sock, (address, _) in self._open.items() if address == busiest)
            _, task = self._open.pop(sock)
            task.add_done_callback(lambda _: sock.close())  # it may not have begun yet
            task.cancel()
