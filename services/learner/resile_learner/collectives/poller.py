"""The links of one worker, the requests of other threads, and how the main thread waits for both.

The main thread moves all data, one operation at a time: a round, a state transfer, a leave. Links outlive operations.
"""

import os
import select
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from .link import BrokenLink, DrainSink, Link, Sink
from .spec import Tag
from .transport import Transport

_ONE = (1).to_bytes(8, sys.byteorder)


class AbortRequest(NamedTuple):
    """Another thread knows that a member will not complete the rounds of a generation."""

    suspect: int
    reason: str
    generation: int


class LinkPoller:
    """Owns the links.

    ``links``, ``add``, ``remove``, ``abort_round``, ``interrupt`` and ``wake`` may be used from any thread, the rest
    from the main thread.
    """

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        """Links that are not known to be broken, by peer. The dict is replaced, never changed."""
        self.newest_tag: Tag | None = None
        """Tag of the newest round that this worker has begun; outside of the round, frames up to it are stale."""
        self._end_operation: Callable[[], None] = _do_nothing
        self._abort_request: AbortRequest | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._has_requests = False
        self._interruption: BaseException | None = None
        self._removed: list[Link] = []
        self._fds = select.poll()
        self._watched: dict[int, Link] = {}
        self._wakeup_read, self._wakeup_write = _wakeup_fds()
        self._fds.register(self._wakeup_read, select.POLLIN)

    def add(self, peer: int, transport: Transport) -> None:
        """Take over a connected and authenticated transport to ``peer``; it replaces an older link."""
        link = Link(peer, transport)
        with self._lock:
            self._remove(peer)
            self.links = {**self.links, peer: link}
            self._wake()

    def remove(self, peer: int) -> None:
        """Break the link to ``peer``, if there is one; a round with it ends."""
        with self._lock:
            self._remove(peer)
            self._wake()

    def abort_round(self, suspect: int, reason: str, *, generation: int) -> None:
        """Make the open round, or else the next one, raise Abandoned here and at every other member.

        It has no effect on rounds of another generation or without ``suspect``.
        """
        with self._lock:
            self._abort_request = AbortRequest(suspect, reason, generation)
            self._wake()

    def interrupt(self, error: BaseException) -> None:
        """Make the current blocking call, or else the next one, raise ``error``."""
        with self._lock:
            self._interruption = error
            self._wake()

    def wake(self) -> None:
        """Make a waiting main thread check its condition again."""
        with self._lock:
            self._wake()

    def _remove(self, peer: int) -> None:
        link = self.links.get(peer)
        if link is not None:
            self.links = {worker: other for worker, other in self.links.items() if worker != peer}
            self._removed.append(link)
            link.remove()

    def _wake(self) -> None:
        self._has_requests = True
        if not self._closed:
            with suppress(BlockingIOError):  # a full pipe wakes the reader too
                os.write(self._wakeup_write, _ONE)

    def links_to(self, peers: Iterable[int]) -> list[Link]:
        """The links to those of ``peers`` that have one."""
        links = self.links
        return [links[peer] for peer in peers if peer in links]

    def begin_operation(self, end: Callable[[], None]) -> None:
        """End the operation that the caller left unfinished, if any; ``end`` ends the one that begins now."""
        end_previous, self._end_operation = self._end_operation, end
        end_previous()

    def poll(self) -> bool:
        """Carry out the requests of other threads: close removed links, raise the error of ``interrupt``.

        Returns whether there were any.
        """
        if not self._has_requests:
            return False
        with self._lock:
            self._has_requests = False
            removed, self._removed = self._removed, []
            error, self._interruption = self._interruption, None
        for link in removed:
            self._close(link)
        if error is not None:
            raise error
        return True

    def take_abort_request(self, *, generation: int, members: Collection[int]) -> AbortRequest | None:
        """Return the request of ``abort_round`` once if it concerns this generation and these members; drop others."""
        with self._lock:
            request, self._abort_request = self._abort_request, None
        if request is not None and request.generation == generation and request.suspect in members:
            return request
        return None

    def receive_from(self, links: Collection[Link]) -> None:
        """From now on receive from these links only; those that are new offer their deferred frames again."""
        for link in self.links.values():
            receiving = link in links
            if receiving and not link.receiving:
                link.resume()
            link.receiving = receiving

    def progress(self, link: Link, sink: Sink) -> None:
        """Receive and send what is possible without waiting; a broken link is dropped."""
        if link.readable and not link.paused and not link.closed:
            try:
                link.receive(sink)
            except BrokenLink:
                self.drop(link)
        if link.pending:
            self.flush(link)

    def flush(self, link: Link) -> None:
        """Send what is possible without waiting; a broken link is dropped."""
        try:
            link.flush()
        except BrokenLink:
            self.drop(link)

    def wait(self, *, timeout_ms: int | None = None) -> bool:
        """Sleep until a link can make progress or another thread wakes this one; mark the links that can.

        Links that the operation does not receive from send their pending frames. Returns False after a timeout.
        """
        for link in self.links.values():
            if link.pending and not link.receiving:
                self.flush(link)
                if link.closed or not link.pending:
                    return True
            self._watch(link)
        ready = self._fds.poll(timeout_ms)
        for fd, events in ready:
            if fd == self._wakeup_read:
                os.read(fd, 4096)
                continue
            link = self._watched[fd]
            link.readable = link.readable or bool(events & ~select.POLLOUT)
            link.writable = link.writable or bool(events & ~select.POLLIN)
        return bool(ready)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Send what is pending until ``ready()``, which is checked again after each ``wake``.

        Frames of rounds that this worker has left are discarded, so that their senders can leave them too.
        """
        drain = DrainSink(self.newest_tag)
        self.serve(lambda: self.links.values(), lambda _: drain, ready)

    def serve(
        self, receive_from: Callable[[], Iterable[Link]], sink: Callable[[Link], Sink], done: Callable[[], bool]
    ) -> None:
        """Run an operation between rounds until ``done()``, with frames from ``receive_from()``.

        Both are evaluated again whenever something has happened. A link that breaks is dropped.
        """
        self.begin_operation(_do_nothing)
        self.receive_from(())
        while True:
            self.poll()
            links = list(receive_from())
            self.receive_from(links)
            for link in links:
                self.progress(link, sink(link))
            if done():
                return
            if list(receive_from()) == links:
                self.wait()

    def drop(self, link: Link) -> None:
        """Close a link that is broken or no longer needed."""
        with self._lock:
            if self.links.get(link.peer) is link:
                self.links = {worker: other for worker, other in self.links.items() if other is not link}
        self._close(link)

    def close(self) -> None:
        """Close all links. The main thread must not use the poller afterwards; other threads may."""
        with self._lock:
            self._closed = True
            for peer in self.links:
                self._remove(peer)
            removed, self._removed = self._removed, []
            for fd in {self._wakeup_read, self._wakeup_write}:
                os.close(fd)
        for link in removed:
            self._close(link)

    def _watch(self, link: Link) -> None:
        if link.closed:
            return
        events = (select.POLLIN if link.receiving and not link.paused else 0) | (select.POLLOUT if link.pending else 0)
        if events != link.watched_events:
            if events:
                self._fds.register(link.fileno(), events)
                self._watched[link.fileno()] = link
            else:
                self._unwatch(link)
            link.watched_events = events

    def _unwatch(self, link: Link) -> None:
        self._fds.unregister(link.fileno())
        del self._watched[link.fileno()]
        link.watched_events = 0

    def _close(self, link: Link) -> None:
        if link.watched_events:
            self._unwatch(link)
        link.close()


def _wakeup_fds() -> tuple[int, int]:
    """A descriptor to wait on and one to write to: an eventfd, or a pipe where there is none."""
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return reading, writing


def _do_nothing() -> None:
    pass
