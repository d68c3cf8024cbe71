"""The control thread of a worker: the asyncio shell around `Membership`.

It talks to the agent and to the control threads of the peers, makes links, and passes data connections on to the
mesh. Other threads ask it through `Control`, under one lock; whatever blocks the main thread is woken through
`Mesh.interrupt`.
"""

import asyncio
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pydantic

from resile_shared.errors import ResileError
from resile_shared.messages.reports import Evidence

from ..collectives.mesh import Mesh
from ..membership import (
    Announce,
    Announced,
    Command,
    Connect,
    Event,
    LinkDown,
    LinkUp,
    Membership,
    OrderSeen,
    Start,
    Switch,
    TellInForce,
    TellOrder,
    ToldInForce,
    Withdraw,
)
from ..messages import (
    Announcement,
    Hello,
    InForce,
    Lost,
    Member,
    Message,
    Order,
    Pause,
    Standing,
    Stop,
    WorkerConfig,
    encode,
    from_peer,
    to_worker,
)
from ..phases import Phases
from ..recovery import LeaveRound, StandingTold, TellStanding
from . import links
from .beats import BEAT, Beats
from .failure import stuck
from .watch import Watch

T = TypeVar("T")

MAX_LINE_BYTES = 1 << 20
REDIAL_SECONDS = 0.2
ACCUSATIONS_PER_DETECTION = 3  # one that is not repeated for `detection_seconds` counts no more


class Withdrawn(ResileError):
    """This joiner is not needed any more."""

    def __init__(self) -> None:
        super().__init__("a newer generation took this worker's place before it had joined")


class ControlThread(threading.Thread):
    """See `Control` for what other threads ask of it."""

    def __init__(self, config: WorkerConfig, agent: socket.socket, mesh: Mesh) -> None:
        super().__init__(name="resile-control", daemon=True)
        self._config = config
        self._agent_socket = agent
        self._mesh = mesh
        self._membership = Membership(config.worker)
        self._changed = threading.Condition()
        self._fault: Exception | None = None
        self.listening = False
        self.started = False
        self.pause_asked = False
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._agent: asyncio.StreamWriter
        self._secrets: defaultdict[int, asyncio.Future[str]] = defaultdict(self._loop.create_future)
        self._peers: dict[int, asyncio.StreamWriter] = {}
        self._ready_kinds: defaultdict[int, set[str]] = defaultdict(set)
        self._dialing: set[int] = set()
        self._beats = Beats(detection_seconds=config.detection_seconds)
        self.phases = Phases()
        self._watch = Watch(detection_seconds=config.detection_seconds, interval=self._beats.interval)
        self._is_stuck = False
        self._accused: set[tuple[int, int]] = set()  # generations, and whom of them
        self._tasks: set[asyncio.Task[None]] = set()

    # what other threads call

    def post(self, event: Event) -> Switch | None:
        """Feed the membership an event."""
        with self._changed:
            commands = self._membership.handle(event)
            self._changed.notify_all()
        self._mesh.wake()
        switch = None
        for command in commands:
            if isinstance(command, Switch):
                switch = command
            else:
                self.call(self._carry_out, command)
        return switch

    def wait_for(self, question: Callable[[Membership], T | None]) -> T:
        """Block until ``question`` has an answer. Raises what stopped this thread."""
        with self._changed:
            while True:
                if self._fault:
                    raise self._fault
                answer = question(self._membership)
                if answer is not None:
                    return answer
                self._changed.wait()

    def ask(self, question: Callable[[Membership], T]) -> T:
        """Return the answer as it is now."""
        with self._changed:
            return question(self._membership)

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Have ``function`` called by this thread, as long as it lives."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End this thread."""
        self.call(self._ended.set)
        self.join(timeout=5)

    # the thread itself

    def run(self) -> None:
        """See ``threading.Thread``."""
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:
            self._fail(error)
        if self._is_stuck:
            os._exit(1)

    async def _main(self) -> None:
        config = self._config
        reader, self._agent = await asyncio.open_connection(sock=self._agent_socket, limit=MAX_LINE_BYTES)
        listener = links.listen(config.host)
        self._spawn(self._accept_all(listener))
        self._spawn(self._read_agent(reader))
        self._spawn(self._beat())
        self.write_to_agent(encode(Hello(worker=config.worker, host=config.host, port=listener.getsockname()[1])))
        with self._changed:
            self.listening = True
            self._changed.notify_all()
        await self._ended.wait()
        listener.close()
        await self._agent.drain()
        self._agent.close()
        await self._agent.wait_closed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._fault = error
            self._changed.notify_all()
        self._mesh.interrupt(error)

    # the agent

    def write_to_agent(self, line: bytes) -> None:
        """Send a line; called by this thread, like all below."""
        self._agent.write(line)

    def accuse(self, suspect: int, evidence: Evidence, reason: str) -> None:
        """Accuse ``suspect``, once in a generation, until there is a newer one."""
        current = self.ask(lambda membership: membership.current)
        if current is None or (current.generation, suspect) in self._accused:
            return
        self._accused.add((current.generation, suspect))
        worker, generation = self._config.worker, current.generation
        self._insist(Lost(worker=worker, generation=generation, suspect=suspect, evidence=evidence, reason=reason))

    def _insist(self, accusation: Lost) -> None:
        current = self.ask(lambda membership: membership.current)
        if current is not None and current.generation == accusation.generation:
            self.write_to_agent(encode(accusation))
            self._loop.call_later(self._config.detection_seconds / ACCUSATIONS_PER_DETECTION, self._insist, accusation)

    async def _read_agent(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            match to_worker.validate_json(line):
                case Stop():
                    os._exit(0)
                case Order() as order:
                    self._order_seen(order)
                case Pause(generation=generation):
                    self._pause(generation)
        if not self._ended.is_set():
            os._exit(1)  # the agent is gone, and with it everyone who could give orders

    def _pause(self, generation: int) -> None:
        """Ignore what was meant for the job's life before this one."""
        with self._changed:
            first = self._membership.first_order
        if not (first and first.cold_start and generation < first.generation):
            self.pause_asked = True

    # the peers

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beats.interval)
            for writer in self._peers.values():
                if not writer.is_closing():
                    writer.write(BEAT)
            for peer in self._beats.silent(now=time.monotonic()):
                self._fell_silent(peer)
            if overdue := self._watch.look(self.phases, now=time.monotonic()):
                self.write_to_agent(encode(stuck(self._config, overdue)))
                self._is_stuck = True
                self._ended.set()
                return

    def _fell_silent(self, peer: int) -> None:
        """Cut what links to ``peer``: whoever waits for it waits no more."""
        if self.ask(lambda membership: membership.counts_on(peer)):
            self.accuse(peer, "silence", f"nothing was heard from it for {self._config.detection_seconds:g} seconds")
        self._lose(peer)
        self._mesh.remove_link(peer)

    def _order_seen(self, order: Order) -> None:
        secret = self._secrets[order.generation]
        if not secret.done():
            secret.set_result(order.secret)
        self.post(OrderSeen(order))

    async def _secret_of(self, generation: int) -> str:
        return await asyncio.shield(self._secrets[generation])

    async def _accept_all(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(listener)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._spawn(self._accept(sock))

    async def _accept(self, sock: socket.socket) -> None:
        config = self._config
        try:
            peer, kind = await links.accept(sock, job=config.job, worker=config.worker, secret_of=self._secret_of)
        except links.LinkRefused:
            return  # a stranger, or a peer that went away: neither is this worker's failure
        await self._adopt(peer, kind, sock)

    async def _dial(self, member: Member, generation: int) -> None:
        secret = await self._secret_of(generation)
        for kind in links.KINDS:
            try:
                sock = await links.dial(
                    member,
                    job=self._config.job,
                    worker=self._config.worker,
                    generation=generation,
                    secret=secret,
                    kind=kind,
                )
            except (OSError, links.LinkRefused):
                self._loop.call_later(REDIAL_SECONDS, self._redial, member.worker)
                return
            await self._adopt(member.worker, kind, sock)
        self._dialing.discard(member.worker)

    def _redial(self, peer: int) -> None:
        self._dialing.discard(peer)
        self._lose(peer)

    async def _adopt(self, peer: int, kind: str, sock: socket.socket) -> None:
        if kind in self._ready_kinds[peer]:  # the peer has seen the end of the old connections already
            self._lose(peer)
        if kind == "data":
            self._mesh.add_link(peer, sock)
        else:
            reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES)
            self._peers[peer] = writer
            self._beats.hear(peer, now=time.monotonic())
            self._spawn(self._read_peer(peer, reader, writer))
        self._ready_kinds[peer].add(kind)
        if len(self._ready_kinds[peer]) == len(links.KINDS):
            self.post(LinkUp(peer))

    async def _read_peer(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (line := await reader.readline()) and self._peers.get(peer) is writer:
                self._beats.hear(peer, now=time.monotonic())
                if line == BEAT:
                    continue
                match from_peer.validate_json(line):
                    case Order() as order:
                        self._order_seen(order)
                    case Announcement(generation=generation):
                        self.post(Announced(peer, generation))
                    case InForce(generation=generation):
                        self.post(ToldInForce(generation))
                    case Standing(generation=generation, round=number):
                        self.post(StandingTold(peer, generation, number))
        except (OSError, ValueError, pydantic.ValidationError):
            pass  # a broken peer is a lost one
        if self._peers.get(peer) is writer:
            self._lose(peer)

    def _lose(self, peer: int) -> None:
        """Forget ``peer``. The data link to a member of the current generation is left.

        Its own end tells more exactly.
        """
        self._ready_kinds.pop(peer, None)
        self._beats.forget(peer)
        writer = self._peers.pop(peer, None)
        if writer:
            writer.close()
        with self._changed:
            current = self._membership.current
        if current is None or peer not in current.workers:
            self._mesh.remove_link(peer)
        self.post(LinkDown(peer))

    def check_link(self, peer: int) -> None:
        """Count the link to ``peer`` as down if its data connection is."""
        if len(self._ready_kinds.get(peer, ())) == len(links.KINDS) and peer not in self._mesh.links:
            self._lose(peer)

    def close_peers(self) -> None:
        """Close the control links."""
        for writer in self._peers.values():
            writer.close()

    # what the membership wants done

    def _carry_out(self, command: Command) -> None:
        match command:
            case Connect(member, generation):
                if member.worker not in self._dialing:
                    self._dialing.add(member.worker)
                    self._spawn(self._dial(member, generation))
            case TellOrder() | Announce() | TellInForce() | TellStanding():
                self._tell(command)
            case LeaveRound(lost, generation):
                self._mesh.abandon(lost, "a generation without it was ordered", generation=generation)
            case Start():
                with self._changed:
                    self.started = True
                    self._changed.notify_all()
            case Withdraw():
                self._fail(Withdrawn())
            case Switch():
                raise AssertionError("a switch is the main thread's to carry out")

    def _tell(self, command: TellOrder | Announce | TellInForce | TellStanding) -> None:
        writer = self._peers.get(command.peer)
        if writer:
            writer.write(encode(_words_of(command)))


def _words_of(command: TellOrder | Announce | TellInForce | TellStanding) -> Message:
    match command:
        case TellOrder(_, order):
            return order
        case Announce(_, generation):
            return Announcement(generation=generation)
        case TellInForce(_, generation):
            return InForce(generation=generation)
        case TellStanding(_, generation, number):
            return Standing(generation=generation, round=number)
