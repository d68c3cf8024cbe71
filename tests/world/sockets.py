"""Simulated connections between workers: byte streams that are slow, cut, one-way, or reset, as TCP's may be.

What is sent arrives in order, or stays on its way while the direction is cut, or the connection is reset. When a
process ends its connections end; when a host is lost nothing is heard from it any more.
"""

import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from resile_learner.collectives.transport import Traffic

from .loop import Process, SimLoop, current_process
from .threads import SimThreading, crash_point

CAPACITY_BYTES = 1 << 16
"""What one direction holds that has not been read at its end."""
KEEPALIVE_SECONDS = 1.0
"""After so long an idle connection is probed, as with a `detection_seconds` of 3."""
KINDS = ("control", "data")
_NO_CONTEXT = Context()
"""What happens on the way belongs to no process."""


class SimNetwork:
    """All connections between workers. ``delay()`` draws the seconds that the next bytes are on their way."""

    def __init__(self, loop: SimLoop, delay: Callable[[], float]) -> None:
        self.loop = loop
        self.delay = delay
        self.lost_hosts: set[str] = set()
        self.num_bytes = 0
        self.sockets: list[SimSocket] = []
        """Every connection that is open, one entry for each end."""
        self._listeners: dict[tuple[str, int], SimSocket] = {}
        self._next_port = 1024
        self._cuts: set[tuple[str, str, str]] = set()
        self._pipes: set[_Pipe] = set()
        self._dialing: deque[asyncio.Future[None]] = deque()

    def listen(self, host: str) -> "SimSocket":
        self._next_port += 1
        sock = SimSocket(self)
        sock.address = (host, self._next_port)
        self._listeners[sock.address] = sock
        return sock

    def listener(self, address: tuple[str, int]) -> "SimSocket | None":
        sock = self._listeners.get(address)
        return None if sock is None or sock.process.is_dead or sock.is_closed else sock

    def cut(self, source: str, target: str, kinds: Sequence[str] = KINDS) -> None:
        """From now on nothing of ``kinds`` arrives at host ``target`` from ``source``; it stays on its way."""
        self._cuts |= {(source, target, kind) for kind in kinds}

    def heal(self) -> None:
        """End all cuts."""
        self._cuts.clear()
        while self._dialing:
            future = self._dialing.popleft()
            if not future.done():
                future.set_result(None)
        for pipe in sorted(self._pipes, key=lambda pipe: pipe.number):
            pipe.pump()

    async def healed(self) -> None:
        """Wait for the next end of all cuts."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._dialing.append(future)
        await future

    def lose_host(self, host: str) -> None:
        """Its power fails: nothing is heard from it any more."""
        self.lost_hosts.add(host)

    def return_host(self, host: str) -> None:
        """It has started again, and knows nothing of its old connections."""
        if host in self.lost_hosts:
            self.lost_hosts.discard(host)
            for pipe in sorted(self._pipes, key=lambda pipe: pipe.number):
                pipe.forget(host)
            for sock in [sock for sock in self.sockets if sock.peer and sock.peer.host == host != sock.host]:
                self.loop.call_later(KEEPALIVE_SECONDS, sock.probe, context=_NO_CONTEXT)

    def reset_between(self, one: str, other: str, kinds: Sequence[str] = KINDS) -> None:
        """Reset the connections between two hosts."""
        for sock in list(self.sockets):
            if sock.is_local or sock.peer is None or sock.kind not in kinds:
                continue
            if {sock.host, sock.peer.host} == {one, other}:
                sock.reset()

    def is_cut(self, source: str, target: str, kind: str) -> bool:
        if not self._cuts and not self.lost_hosts:
            return False
        is_lost = source != target and (source in self.lost_hosts or target in self.lost_hosts)
        return is_lost or (source, target, kind) in self._cuts

    def pair(self, process: Process) -> "tuple[SimSocket, SimSocket]":
        """Connect the current process with ``process`` on the same host."""
        ours, theirs = SimSocket(self), SimSocket(self, process)
        ours.is_local = theirs.is_local = True
        ours.connect_to(theirs)
        return ours, theirs


class _Pipe:
    """One direction of a connection. Items are bytes, None for the end of the stream, or an error."""

    count = 0

    def __init__(self, network: SimNetwork, source: "SimSocket", target: "SimSocket") -> None:
        _Pipe.count += 1
        self.number = _Pipe.count
        self._network = network
        self._source = source
        self._target = target
        self._items: deque[bytes | OSError | None] = deque()
        self._due = 0
        self._last = 0.0
        self.cut_since: float | None = None
        """Since when something has been kept on its way by a cut."""
        self.num_unread = 0

    def send(self, item: bytes | OSError | None) -> None:
        if self._source.process.is_dead and isinstance(item, bytes):
            return
        if isinstance(item, bytes):
            self.num_unread += len(item)
            self._network.num_bytes += len(item)
        self._items.append(item)
        self._network._pipes.add(self)
        now = self._network.loop.now
        self._last = max(self._last, now + (0.0 if self._source.is_local else self._network.delay()))
        self._network.loop.call_at(self._last, self._on_due, context=_NO_CONTEXT)

    def _on_due(self) -> None:
        self._due = min(self._due + 1, len(self._items))
        self.pump()

    def clear(self) -> None:
        self._items.clear()
        self._due = 0

    def forget(self, host: str) -> None:
        if self._source.host == host and self._source.process.is_dead:
            self.clear()
        self.pump()

    def pump(self) -> None:
        source, target = self._source, self._target
        while self._due and self._items:
            if not source.is_local and self._network.is_cut(source.host, target.host, source.kind):
                self.cut_since = self._network.loop.now if self.cut_since is None else self.cut_since
                return
            self.cut_since = None
            self._due -= 1
            target.receive(self._items.popleft())
        if not self._items:
            self._network._pipes.discard(self)


class SimSocket:
    """One end of a connection, or a listener. It belongs to the process that made it."""

    def __init__(self, network: SimNetwork, process: Process | None = None) -> None:
        owner = process or current_process()
        assert owner is not None
        self.process: Process = owner
        self.host = owner.host
        self.network = network
        self.kind = "control"
        self.address: tuple[str, int] = (self.host, 0)
        self.peer: SimSocket | None = None
        self.buffer = bytearray()
        self.is_eof = False
        self.error: OSError | None = None
        self.is_closed = False
        self.is_local = False
        self.on_change: Callable[[], None] | None = None
        self.stream: StreamTransport | None = None
        self._has_sent_eof = False
        self._out: _Pipe | None = None
        self._backlog: deque[SimSocket] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        owner.on_death.append(self._on_death)

    # as a kernel does

    def connect_to(self, other: "SimSocket") -> None:
        self.peer, other.peer = other, self
        self._out, other._out = _Pipe(self.network, self, other), _Pipe(self.network, other, self)
        self.network.sockets += [self, other]

    def receive(self, item: bytes | OSError | None) -> None:
        if self.process.is_dead or self.is_closed:
            if isinstance(item, bytes) and self._out is not None:
                self._out.send(ConnectionResetError("connection reset by peer"))
            return
        if isinstance(item, OSError):
            self.error = item
        elif item is None:
            self.is_eof = True
        else:
            self.buffer += item
        self._changed()

    def _changed(self) -> None:
        if self.stream is not None:
            self.stream.on_socket()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
        if self.on_change is not None:
            self.on_change()

    def read(self, num_bytes: int) -> bytes:
        """Return what has arrived; b"" at the end. Raises BlockingIOError and ConnectionResetError."""
        if self.buffer:
            data = bytes(self.buffer[:num_bytes])
            del self.buffer[:num_bytes]
            self.took(len(data))
            return data
        if self.error is not None:
            raise self.error
        if self.is_closed:
            raise OSError("the socket is closed")
        if self.is_eof:
            return b""
        raise BlockingIOError

    def took(self, num_bytes: int) -> None:
        """Count bytes as read; the peer may send as many more."""
        assert self.peer is not None
        pipe = self.peer._out
        assert pipe is not None
        was_full = pipe.num_unread >= CAPACITY_BYTES
        pipe.num_unread -= num_bytes
        if was_full and self.peer.on_change is not None:
            self.peer.on_change()

    @property
    def room(self) -> int:
        return max(0, CAPACITY_BYTES - self._out.num_unread) if self._out else 0

    @property
    def is_readable(self) -> bool:
        return bool(self.buffer) or self.is_eof or self.error is not None

    def write(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        if self.is_closed or self._has_sent_eof or self._out is None:
            raise BrokenPipeError("broken pipe")
        self._out.send(data)

    def shutdown(self, how: int) -> None:
        if not self._has_sent_eof and self._out is not None and not self.process.is_dead:
            self._has_sent_eof = True
            self._out.send(None)
        if how == socket.SHUT_RDWR:
            self.is_eof = True
            self._changed()

    def reset(self) -> None:
        """Reset the connection at both ends, as a router may."""
        assert self.peer is not None
        for end in (self, self.peer):
            end.receive(ConnectionResetError("connection reset by peer"))

    def lose_peer(self) -> None:
        """The machine at the other end is lost, and with it all that this end has not read."""
        assert self.peer is not None
        assert self.peer._out is not None
        self.buffer.clear()
        self.peer._out.clear()
        self.receive(ConnectionResetError("connection reset by peer"))

    def probe(self) -> None:
        """Ask the other end whether it still knows this connection, as TCP's keepalive does where it is idle."""
        if self.peer is not None and self.peer.process.is_dead:
            self.receive(ConnectionResetError("connection reset by peer"))

    def close(self) -> None:
        if self.is_closed or self.process.is_dead:
            return
        if self._out is not None and not self._has_sent_eof:
            self._has_sent_eof = True
            self._out.send(ConnectionResetError("connection reset by peer") if self.buffer else None)
        self._end()

    def _end(self) -> None:
        self.is_closed = True
        if self.peer is not None and self in self.network.sockets:
            self.network.sockets.remove(self)
        if self.peer is None:
            self.network._listeners.pop(self.address, None)

    def _on_death(self) -> None:
        if not self.is_closed:
            self._end()
            if self._out is not None and not self._has_sent_eof:
                self._out.send(ConnectionResetError("connection reset by peer") if self.buffer else None)
            for waiting in self._backlog:
                waiting.close()

    # as asyncio's loop.sock_* use it

    async def connect(self, address: tuple[str, int]) -> None:
        network, loop = self.network, self.network.loop
        target = address[0]
        await asyncio.sleep(2 * network.delay())
        while network.is_cut(self.host, target, "control") or network.is_cut(target, self.host, "control"):
            await network.healed()
        listener = network.listener(address)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        theirs = SimSocket(network, listener.process)
        self.connect_to(theirs)
        listener._backlog.append(theirs)
        loop.call_soon(listener._changed, context=_NO_CONTEXT)

    async def accept(self) -> "tuple[SimSocket, tuple[str, int]]":
        while not self._backlog:
            await self._wait()
        sock = self._backlog.popleft()
        return sock, sock.address

    async def recv(self, num_bytes: int) -> bytes:
        while True:
            try:
                return self.read(num_bytes)
            except BlockingIOError:
                await self._wait()

    async def sendall(self, data: bytes) -> None:
        self.write(data)

    async def _wait(self) -> None:
        future: asyncio.Future[None] = self.network.loop.create_future()
        self._waiting.append(future)
        await future

    # what the product sets, without effect here

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, *_: object) -> None:
        pass

    def dup(self) -> "_Duplicate":
        return _Duplicate(self)

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def fileno(self) -> int:
        return -1 if self.is_closed else 0

    def open_stream(self, protocol: asyncio.Protocol) -> "StreamTransport":
        self.stream = StreamTransport(self, protocol)
        protocol.connection_made(self.stream)
        if self.is_readable:
            self.stream.on_socket()
        return self.stream


class _Duplicate:
    """Another descriptor of a socket, which never blocks."""

    def __init__(self, sock: SimSocket) -> None:
        self._sock = sock

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def recv(self, num_bytes: int) -> bytes:
        return self._sock.read(num_bytes)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class StreamTransport(asyncio.Transport):
    """asyncio's transport over a simulated socket."""

    def __init__(self, sock: SimSocket, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": sock})
        self._sock = sock
        self._protocol = protocol
        self._is_closing = False
        self._is_paused = False
        self._has_told_eof = False

    def on_socket(self) -> None:
        sock = self._sock
        if self._is_closing or self._is_paused:
            return
        if sock.buffer:
            self._protocol.data_received(sock.read(len(sock.buffer)))
        if sock.error is not None:
            self._lose(sock.error)
        elif sock.is_eof and not self._has_told_eof:
            self._has_told_eof = True
            if not self._protocol.eof_received():
                self.close()

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        try:
            self._sock.write(bytes(data))
        except OSError as error:
            self._lose(error)

    def write_eof(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._lose(None)

    abort = close

    def _lose(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._sock.close()
            self._sock.network.loop.call_soon(self._protocol.connection_lost, error)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self.on_socket()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class DataTransport:
    """In place of `TcpTransport`."""

    def __init__(self, sock: SimSocket) -> None:
        self._sock = sock
        sock.kind = "data"
        if sock.peer is not None:
            sock.peer.kind = "data"

    def fileno(self) -> Any:
        return self._sock

    def send(self, buffers: Sequence[bytes | memoryview], /) -> int:
        crash_point()
        if self._sock.error is None and not self._sock.room:
            raise BlockingIOError
        data = b"".join(buffers)[: self._sock.room]
        self._sock.write(data)
        return len(data)

    def receive(self, buffers: Sequence[memoryview], /) -> int:
        data = self._sock.read(sum(map(len, buffers)))
        taken = 0
        for view in buffers:
            part = data[taken : taken + len(view)]
            view[: len(part)] = part
            taken += len(part)
            if taken == len(data):
                break
        return taken

    def traffic(self) -> Traffic:
        return Traffic()

    def unacknowledged_seconds(self) -> float:
        pipe = self._sock._out
        return 0.0 if pipe is None or pipe.cut_since is None else self._sock.network.loop.now - pipe.cut_since

    def write_eof(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


@dataclass(eq=False)
class EventFd:
    """What wakes a thread that waits for sockets."""

    is_set: bool = False
    on_change: Callable[[], None] | None = None


@dataclass
class SimPoll:
    """In place of ``select.poll``, over simulated sockets and one `EventFd`."""

    threads: SimThreading
    _watched: dict[Any, int] = field(default_factory=dict)
    _is_waiting: bool = False

    def register(self, fd: Any, events: int) -> None:
        self._watched[fd] = events
        fd.on_change = self._on_change

    def unregister(self, fd: Any) -> None:
        del self._watched[fd]
        fd.on_change = None

    def poll(self, timeout_ms: int | None = None) -> list[tuple[Any, int]]:
        loop = self.threads.loop
        deadline = None if timeout_ms is None else loop.now + timeout_ms / 1000
        me = self.threads.running()
        self._wake = me.wake
        while not (ready := self._ready()):
            left = None if deadline is None else deadline - loop.now
            if left is not None and left <= 0:
                return []
            self._is_waiting = True
            me.park(left)
            self._is_waiting = False
        return ready

    def _on_change(self) -> None:
        if self._is_waiting:
            self._wake()

    def _ready(self) -> list[tuple[Any, int]]:
        ready = []
        for fd, events in self._watched.items():
            if isinstance(fd, EventFd):
                found = select.POLLIN if fd.is_set else 0
            else:
                found = (events & select.POLLIN) if fd.is_readable else 0
                found |= (events & select.POLLOUT) if fd.room or fd.error else 0
                found |= select.POLLERR if fd.error else 0
            if found:
                ready.append((fd, found))
        return ready


class Replacing:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def simulated_select(threads: SimThreading) -> Replacing:
    return Replacing(select, poll=lambda: SimPoll(threads))


def simulated_os(exit_process: Callable[[int], Any]) -> Replacing:
    """``os`` with event descriptors, and with an end of the process that ends the simulated one."""

    def write(fd: EventFd, _: bytes) -> None:
        fd.is_set = True
        if fd.on_change is not None:
            fd.on_change()

    def read(fd: EventFd, _: int) -> None:
        fd.is_set = False

    return Replacing(os, eventfd=lambda *_: EventFd(), write=write, read=read, close=lambda _: None, _exit=exit_process)


def simulated_socket(network: SimNetwork) -> Replacing:
    return Replacing(
        socket,
        socket=lambda *_: SimSocket(network),
        create_server=lambda address, **_: network.listen(address[0]),
    )
