"""The links of one worker, what other threads have to say to its main thread, and how that thread waits for both."""

import os
import select
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from .link import BrokenLink, Link, Sink

_ONE = (1).to_bytes(8, sys.byteorder)


class Suspicion(NamedTuple):
    """Another thread's word that a member of the open round will not complete it."""

    suspect: int
    reason: str
    generation: int | None
    """Of the newest round when it was said; None before the first."""


class Switchboard:
    """Holds the links. ``add``, ``remove``, ``suspect`` and ``interrupt`` may be called from any thread."""

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self._suspicion: Suspicion | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._news = False
        self._error: BaseException | None = None
        self._retired: list[Link] = []
        self._poller = select.poll()
        self._watched: dict[int, Link] = {}
        self._wakeup, self._alarm = _alarm()
        self._poller.register(self._wakeup, select.POLLIN)

    def add(self, link: Link) -> None:
        """A new link; it takes the place of an older one to the same peer."""
        with self._lock:
            self._retire(link.peer)
            self.links = {**self.links, link.peer: link}
            self._wake()

    def remove(self, peer: int) -> None:
        """Cut the link to ``peer``, if there is one."""
        with self._lock:
            self._retire(peer)
            self._wake()

    def suspect(self, suspicion: Suspicion) -> None:
        """Let the round that is open, or the next one of the same generation, end with this suspicion."""
        with self._lock:
            self._suspicion = suspicion
            self._wake()

    def interrupt(self, error: BaseException) -> None:
        """Let the blocking call that is under way, or else the next one, raise ``error``."""
        with self._lock:
            self._error = error
            self._wake()

    def wake(self) -> None:
        """Let a waiting main thread look around."""
        with self._lock:
            self._wake()

    def _retire(self, peer: int) -> None:
        link = self.links.get(peer)
        if link is not None:
            self.links = {worker: other for worker, other in self.links.items() if worker != peer}
            self._retired.append(link)
            link.retire()

    def _wake(self) -> None:
        self._news = True
        if not self._closed:
            with suppress(BlockingIOError):  # a pipe that is full wakes just as well
                os.write(self._alarm, _ONE)

    def attend(self) -> bool:
        """Close removed links and raise what ``interrupt`` left; say whether another thread has said anything."""
        if not self._news:
            return False
        with self._lock:
            self._news = False
            retired, self._retired = self._retired, []
            error, self._error = self._error, None
        for link in retired:
            self._close(link)
        if error is not None:
            raise error
        return True

    def forget_suspicion_unless(self, *, generation: int, members: Collection[int]) -> None:
        """Forget what ``suspect`` left unless it concerns a round of this generation and these members."""
        with self._lock:
            said = self._suspicion
            if said is not None and (said.generation not in (None, generation) or said.suspect not in members):
                self._suspicion = None

    def take_suspicion(self) -> Suspicion | None:
        """What ``suspect`` left, once."""
        with self._lock:
            suspicion, self._suspicion = self._suspicion, None
        return suspicion

    def listen(self, links: Collection[Link]) -> None:
        """From now on wait for frames on these links alone; those that are new among them offer their frames again."""
        for link in self.links.values():
            heard = link in links
            if heard and not link.listening:
                link.unpark()
            link.listening = heard

    def move(self, link: Link, sink: Sink) -> None:
        """Receive what is there and send what can be sent; a broken link is dropped."""
        if link.readable and not link.parked and not link.closed:
            try:
                link.receive(sink)
            except BrokenLink:
                self.drop(link)
        if link.pending:
            self.flush(link)

    def flush(self, link: Link) -> None:
        """Send what can be sent; a broken link is dropped."""
        try:
            link.flush()
        except BrokenLink:
            self.drop(link)

    def wait(self, *, patience_ms: int | None = None) -> bool:
        """Sleep until a link can move on or another thread has something to say, and mark what can.

        Links that nobody listens to are sent what is left for them. False if nothing happened in ``patience_ms``.
        """
        for link in self.links.values():
            if link.pending and not link.listening:
                self.flush(link)
                if link.closed or not link.pending:
                    return True
            self._watch(link)
        happened = self._poller.poll(patience_ms)
        for fd, events in happened:
            if fd == self._wakeup:
                os.read(fd, 4096)
                continue
            link = self._watched[fd]
            link.readable = link.readable or bool(events & ~select.POLLOUT)
            link.writable = link.writable or bool(events & ~select.POLLIN)
        return bool(happened)

    def drop(self, link: Link) -> None:
        """Close a link that is of no more use."""
        with self._lock:
            if self.links.get(link.peer) is link:
                self.links = {worker: other for worker, other in self.links.items() if other is not link}
        self._close(link)

    def close(self) -> None:
        """Close all links; nothing else may be asked of it afterwards by the main thread."""
        with self._lock:
            self._closed = True
            for peer in self.links:
                self._retire(peer)
            retired, self._retired = self._retired, []
            for fd in {self._wakeup, self._alarm}:
                os.close(fd)
        for link in retired:
            self._close(link)

    def _watch(self, link: Link) -> None:
        if link.closed:
            return
        wanted = (select.POLLIN if link.listening and not link.parked else 0) | (select.POLLOUT if link.pending else 0)
        if wanted != link.watched:
            if wanted:
                self._poller.register(link.fileno(), wanted)
                self._watched[link.fileno()] = link
            else:
                self._unwatch(link)
            link.watched = wanted

    def _unwatch(self, link: Link) -> None:
        self._poller.unregister(link.fileno())
        del self._watched[link.fileno()]
        link.watched = 0

    def _close(self, link: Link) -> None:
        if link.watched:
            self._unwatch(link)
        link.close()


def _alarm() -> tuple[int, int]:
    """A descriptor to wait on and one to write to: an eventfd, or a pipe where there is none."""
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return reading, writing
