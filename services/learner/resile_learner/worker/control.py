"""What the control thread of a worker does: the asyncio shell around `Membership`.

It talks to the agent and, through `PeerConnections`, to the peers. Both threads have the membership handle their
events, under one lock; the control thread alone carries the commands out, in the order of the decisions. After each
event a frozen `MembershipView` is published, which any thread may read; a main thread that waits for links is woken.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from resile_shared.errors import ResileError
from resile_shared.messages.reports import Evidence

from ..collectives.device.communicators import Communicators
from ..collectives.poller import LinkPoller
from ..membership.events import AbandonRound, Connect, Event, MainThreadCommand, PauseRequested, SendToPeer, Withdraw
from ..membership.machine import Membership
from ..membership.view import MembershipView
from ..messages import (
    Failed,
    Message,
    Order,
    Pause,
    Stop,
    StoreEntry,
    WorkerConfig,
    WorkerListening,
    encode,
    to_worker,
)
from ..phases import Phases
from .failure_detection import HEARTBEATS_PER_DETECTION, Stall, StallDetector, Suspicions
from .peers import PeerConnections

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["WorkerControl", P], T]

CLOSE_SECONDS = 2.0
FLUSH_SECONDS = 1.0


class Withdrawn(ResileError):
    """This joiner is not needed any more."""

    def __init__(self) -> None:
        super().__init__("a newer generation took this worker's place before it had joined")


def main_thread(method: Method[P, T]) -> Method[P, T]:
    """Assert that ``method`` is called by the thread that made the `WorkerControl`."""
    return _of_thread("main", method)


def control_thread(method: Method[P, T]) -> Method[P, T]:
    """Assert that ``method`` is called by the thread that runs `WorkerControl.run`."""
    return _of_thread("control", method)


def _of_thread(name: str, method: Method[P, T]) -> Method[P, T]:
    @wraps(method)
    def checked(self: "WorkerControl", /, *args: P.args, **kwargs: P.kwargs) -> T:
        owner = self._main_thread if name == "main" else self._control_thread
        assert threading.current_thread() is owner, f"{method.__name__} belongs to the {name} thread"
        return method(self, *args, **kwargs)

    return checked


class WorkerControl:
    """The control side of one worker, on ``loop``. Private methods are for the control thread, public ones for others.

    Of these `wait_for` and `post` are for the main thread alone. ``exit_process`` ends the process at once;
    ``describe_stall`` says where the main thread is.
    """

    def __init__(
        self,
        config: WorkerConfig,
        poller: LinkPoller,
        loop: asyncio.AbstractEventLoop,
        *,
        exit_process: Callable[[int], None],
        describe_stall: Callable[[Stall], Failed],
    ) -> None:
        self.phases = Phases()
        """Record of what the main thread is doing, which is watched for stalls."""
        self.is_stalled = False
        """Whether `run` ended because the main thread makes no progress."""
        self._config = config
        self._poller = poller
        self._loop = loop
        self._exit_process = exit_process
        self._describe_stall = describe_stall
        self._main_thread = threading.current_thread()
        self._control_thread: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._agent: asyncio.StreamWriter
        self._membership = Membership(config.worker)
        self._peers = PeerConnections(
            config,
            poller,
            lambda: self.view,
            handle=self._handle,
            on_entry=self._on_entry,
            report=self._send_to_agent,
            spawn=self._spawn,
        )
        self.communicators = Communicators(config.worker, host=config.host, send=self._send_entry, notify=self._notify)
        self._heartbeat_seconds = config.detection_seconds / HEARTBEATS_PER_DETECTION
        self._stalls = StallDetector(detection_seconds=config.detection_seconds, interval=self._heartbeat_seconds)
        self._suspicions = Suspicions(config.worker, detection_seconds=config.detection_seconds)
        self._changed = threading.Condition()  # guards what follows
        self.view = self._membership.view
        """The membership after the last event."""
        self._is_listening = False
        self._fault: Exception | None = None

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: socket.socket) -> None:
        """Serve the agent at the other end of ``reader`` and ``writer``, and peers that connect to ``listener``.

        Returns after `end`, or when the main thread has stalled.
        """
        self._control_thread, self._agent = threading.current_thread(), writer
        accepting = self._spawn(self._peers.accept_all(listener))
        reading = self._spawn(self._read_agent(reader))
        self._spawn(self._watch())
        host, port = self._config.host, listener.getsockname()[1]
        self._send_to_agent(WorkerListening(worker=self._config.worker, host=host, port=port))
        with self._changed:
            self._is_listening = True
            self._changed.notify_all()
        await self._ended.wait()
        accepting.cancel()
        await asyncio.wait({accepting})  # the loop watches the descriptor, which others may get once it is closed
        listener.close()
        await self._close_agent(reading)
        with suppress(OSError):  # it may be broken
            await writer.wait_closed()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wait_until_listening(self) -> None:
        """Block until peers can connect to this worker. Raises what stopped the control thread."""
        self.wait_for(lambda _: self._is_listening or None)

    @main_thread
    def wait_for(self, question: Callable[[MembershipView], T | None]) -> T:
        """Block until ``question`` has an answer that is not None. Raises what stopped the control thread."""
        with self._changed:
            while True:
                if self._fault:
                    raise self._fault
                answer = question(self.view)
                if answer is not None:
                    return answer
                self._changed.wait()

    @main_thread
    def post(self, event: Event) -> MainThreadCommand | None:
        """Have the membership handle ``event``; return what it decides that the main thread has to do, if anything.

        Raises what stopped the control thread.
        """
        if self._fault:
            raise self._fault
        return self._handle(event)

    def report(self, message: Message) -> None:
        """Send ``message`` to the agent."""
        self._call(self._send_to_agent, message)

    @main_thread
    def flush(self) -> None:
        """Block until what was reported is on its way to the agent, for a second at the most."""
        is_sent = threading.Event()
        self._call(is_sent.set)
        is_sent.wait(FLUSH_SECONDS)

    def report_suspect(self, suspect: int, evidence: Evidence, reason: str) -> None:
        """Report ``suspect`` of the current generation to the agent, again and again until a newer one is active."""
        self._call(self._report_suspect, suspect, evidence, reason, self._generation)

    def complete(self) -> None:
        """Report no suspects from now on: training is complete here, and nobody is missed."""
        self._call(self._suspicions.complete)

    def check_link(self, peer: int) -> None:
        """Count ``peer`` as disconnected, and connect again, if its data connection is known to be broken."""
        self._call(self._peers.check, peer)

    def close_links(self) -> None:
        """Close the control connections, which shows all peers that this worker leaves."""
        self._call(self._peers.close)

    def end(self) -> None:
        """Have `run` send what is still unsent to the agent, and return."""
        self._call(self._ended.set)

    def fail(self, error: Exception) -> None:
        """Let the main thread raise ``error`` where it waits, or else at its next call."""
        with self._changed:
            self._fault = error
            self._changed.notify_all()
        self._poller.interrupt(error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Have ``function`` called by the control thread, after all earlier ones; once that has ended, do nothing."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._guard, function, *args)

    @control_thread
    def _guard(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception as error:
            self.fail(error)

    async def _close_agent(self, reading: "asyncio.Task[None]") -> None:
        """Close the connection after the agent has: closing over unread data loses what the agent has not read."""
        with suppress(OSError):
            self._agent.write_eof()
        await asyncio.wait({reading}, timeout=CLOSE_SECONDS)
        self._agent.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.fail(error)

    @control_thread
    def _send_to_agent(self, message: Message) -> None:
        self._agent.write(encode(message))

    async def _read_agent(self, reader: asyncio.StreamReader) -> None:
        while line := await _read_line(reader):
            match to_worker.validate_json(line):
                case Stop():
                    self._exit_process(0)
                case Order() as order:
                    self._peers.on_order(order)
                case Pause(lineage=lineage):
                    self._handle(PauseRequested(lineage))
        if not self._ended.is_set():
            self._exit_process(1)  # the agent is gone, and with it the only source of orders

    @property
    def _generation(self) -> int | None:
        current = self.view.current
        return current.generation if current else None

    @control_thread
    def _report_suspect(self, suspect: int, evidence: Evidence, reason: str, generation: int | None) -> None:
        now = self._loop.time()
        message = self._suspicions.add(suspect, evidence, reason, generation=generation, now=now)
        if message:
            self._send_to_agent(message)

    async def _watch(self) -> None:
        """Send heartbeats, and look for peers that have fallen silent and for a main thread that has stalled."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            now = self._loop.time()
            self._peers.send_heartbeats()
            for peer in self._peers.take_silent():
                self._on_silent(peer)
            for peer in self._peers.take_blocked():
                self._on_blocked(peer)
            for suspicion in self._suspicions.due(generation=self._generation, now=now):
                self._send_to_agent(suspicion)
            if stall := self._stalls.check(self.phases, now=now):
                self._send_to_agent(self._describe_stall(stall))
                self.is_stalled = True
                self._ended.set()
                return

    def _on_silent(self, peer: int) -> None:
        """Close all connections to ``peer``, so that nothing waits for it any more."""
        seconds = self._config.detection_seconds
        self._report_if_counted_on(peer, "silence", f"nothing was received from it for {seconds:g} seconds")
        self._peers.disconnect(peer)
        self._poller.remove(peer)

    def _on_blocked(self, peer: int) -> None:
        """Break the data connection to ``peer``, which is alive: the round ends, and both connect anew."""
        seconds = self._config.detection_seconds
        reason = f"its system confirmed nothing that was sent to it for {seconds:g} seconds"
        self._report_if_counted_on(peer, "broken link", reason)
        self._poller.remove(peer)

    def _report_if_counted_on(self, peer: int, evidence: Evidence, reason: str) -> None:
        with self._changed:
            counts_on_it = self._membership.counts_on(peer)
            generation = self._generation
        if counts_on_it:
            self._report_suspect(peer, evidence, reason, generation)

    def _handle(self, event: Event) -> MainThreadCommand | None:
        """Handle ``event``, publish the view, and have the control thread carry the commands out.

        A command for the main thread is returned instead. Both threads call this: under the lock commands are queued in
        the order of the decisions, and the main thread need not wait for the other one at a switch.
        """
        answer = None
        with self._changed:
            try:
                commands = self._membership.handle(event)
            except Exception as error:
                self._fault = error
                raise
            for command in commands:
                if isinstance(command, MainThreadCommand):
                    answer = command
                else:
                    self._call(self._carry_out, command)
            self.view = self._membership.view
            self.communicators.want(self.view.connected)
            self._changed.notify_all()
        self._poller.wake()
        return answer

    def _notify(self) -> None:
        """A communicator has changed: let the main thread look again, wherever it waits."""
        with self._changed:
            self._changed.notify_all()
        self._poller.wake()

    def _send_entry(self, workers: Collection[int], generation: int, key: str, value: bytes) -> None:
        message = StoreEntry(generation=generation, key=key, value=value.hex())
        for worker in workers:
            self._call(self._peers.send, worker, message)

    def _on_entry(self, entry: StoreEntry) -> None:
        self.communicators.receive(entry.generation, entry.key, bytes.fromhex(entry.value))

    def _carry_out(self, command: Connect | SendToPeer | AbandonRound | Withdraw) -> None:
        match command:
            case Connect(member, generation):
                self._peers.connect(member, generation)
            case SendToPeer(peer, message):
                self._peers.send(peer, message)
            case AbandonRound(lost, generation):
                self._poller.abort_round(lost, "a generation without it was ordered", generation=generation)
            case Withdraw():
                self.fail(Withdrawn())


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """The next line of the agent; empty at the end, or after a reset: the agent was killed with unread data."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""
