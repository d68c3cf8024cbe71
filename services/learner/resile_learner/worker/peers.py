"""The connections of a worker to its peers. All of it belongs to the control thread.

Each pair of workers has two: one for control messages, which is read and written here, and one for data, which is
handed to the link poller.
"""

import asyncio
import os
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Callable

import pydantic

from ..collectives.poller import LinkPoller
from ..collectives.segments import LEASES_PER_NEIGHBOR
from ..collectives.transport import TcpTransport
from ..membership.events import Event, LinkDown, LinkUp, MessageReceived, OrderReceived
from ..membership.view import MembershipView
from ..messages import GrowthRefused, Heartbeat, Member, Order, PeerMessage, StoreEntry, WorkerConfig, encode, from_peer
from . import links
from .failure_detection import PeerLiveness
from .handshakes import Handshakes, Spawn

MAX_LINE_BYTES = 4 << 20  # an order of `MAX_WORKERS` members
RECONNECT_SECONDS = 0.2
OTHER_DESCRIPTORS = 64
"""Descriptors that a worker needs besides those for its peers."""


class PeerConnections:
    """Makes, watches and closes the connections to the peers, and reports as events what happens to them."""

    def __init__(
        self,
        config: WorkerConfig,
        poller: LinkPoller,
        view: Callable[[], MembershipView],
        *,
        handle: Callable[[Event], object],
        on_entry: Callable[[StoreEntry], None],
        report: Callable[[GrowthRefused], None],
        spawn: Spawn,
    ) -> None:
        self.generations = links.Generations()
        self._config = config
        self._poller = poller
        self._view = view
        self._handle = handle
        self._on_entry = on_entry
        self._report = report
        self._spawn = spawn
        self._handshakes = Handshakes(
            job=config.job,
            worker=config.worker,
            credentials_of=self.generations.wait_for,
            adopt=self._adopt,
            spawn=spawn,
        )
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._established: defaultdict[int, list[links.Kind]] = defaultdict(list)  # in their order
        self._connecting: set[int] = set()
        self._liveness = PeerLiveness(detection_seconds=config.detection_seconds)
        self._data_liveness = PeerLiveness(detection_seconds=config.detection_seconds)

    def on_order(self, order: Order) -> None:
        """Let its workers prove that they belong to ``order``, then have the membership handle it.

        An order for which this process may not have enough files open is refused: the scheduler withdraws it.
        """
        if refused := self._refusal(order):
            self._report(refused)
            return
        self.generations.add(order)
        self._handle(OrderReceived(order))

    def _refusal(self, order: Order) -> GrowthRefused | None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._config.worker not in order.workers or order.is_recovery or limit == resource.RLIM_INFINITY:
            return None
        size, own = len(order.members), self._count_own_descriptors(limit)
        neighbors = sum(member.host == self._config.host for member in order.members)
        needed = len(links.KINDS) * size + LEASES_PER_NEIGHBOR * neighbors
        if needed + own <= limit:
            return None
        text = (
            f"worker {self._config.worker} on {self._config.host} cannot train with {size} workers: each needs two "
            f"connections to every other one, and a process may have {limit} files open there, of which it has {own} "
            "open for other things; raise the hard limit of open files (ulimit -Hn, LimitNOFILE in systemd)"
        )
        return GrowthRefused(
            worker=self._config.worker,
            generation=order.generation,
            most_workers=max(1, size * max(limit - own, 0) // needed),
            message=text,
        )

    def _count_own_descriptors(self, limit: int) -> int:
        """Count the files that are open beside the connections, such as those of the script, and a few to spare."""
        connected = sum(map(len, self._established.values()))
        try:
            num_open = len(os.listdir("/proc/self/fd"))
        except OSError:  # not even one more can be opened
            num_open = limit
        return max(OTHER_DESCRIPTORS, num_open - connected)

    def connect(self, member: Member, generation: int) -> None:
        """Connect to ``member``, again and again until it succeeds or the membership does not want it any more."""
        if member.worker not in self._connecting:
            self._connecting.add(member.worker)
            self._spawn(self._dial(member, generation))

    def send(self, peer: int, message: PeerMessage) -> None:
        """Send ``message`` to ``peer``; nothing if it has disconnected."""
        if writer := self._writers.get(peer):
            writer.write(encode(message))

    def send_heartbeats(self) -> None:
        """Send every peer a heartbeat."""
        heartbeat = encode(Heartbeat(generation=self._view().newest))
        for writer in self._writers.values():
            if not writer.is_closing():
                writer.write(heartbeat)

    def take_silent(self) -> list[int]:
        """Return, once, the peers that have fallen silent."""
        return self._liveness.take_silent(now=time.monotonic())

    def take_blocked(self) -> list[int]:
        """Return, once, the peers whose systems have not confirmed what was sent for ``detection_seconds``."""
        now, peers = time.monotonic(), self._poller.links
        for peer, link in peers.items():
            if link.unacknowledged_seconds() <= self._data_liveness.interval:
                self._data_liveness.record(peer, now=now)
        return [peer for peer in self._data_liveness.take_silent(now=now) if peer in peers]

    def disconnect(self, peer: int) -> None:
        """Close the control connection to ``peer``.

        The data connection to a member of the current generation stays: its own end tells more exactly which frames
        arrived.
        """
        self._established.pop(peer, None)
        self._liveness.remove(peer)
        if writer := self._writers.pop(peer, None):
            writer.close()
        current = self._view().current
        if current is None or peer not in current.workers:
            self._poller.remove(peer)
        self._handle(LinkDown(peer))

    def check(self, peer: int) -> None:
        """Disconnect ``peer`` if its data connection is known to be broken; the membership then connects again."""
        if self._is_connected(peer) and peer not in self._poller.links:
            self.disconnect(peer)

    def close(self) -> None:
        """Close the control connections, which shows all peers that this worker leaves."""
        for writer in self._writers.values():
            writer.close()

    async def accept_all(self, listener: socket.socket) -> None:
        """Accept the connections of peers until ``listener`` is closed."""
        await self._handshakes.accept_all(listener)

    async def _dial(self, member: Member, generation: int) -> None:
        secret = (await self.generations.wait_for(generation)).secret
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
                break
            await self._adopt(member.worker, kind, sock)
        if self._is_connected(member.worker):
            self._connecting.discard(member.worker)
        else:  # the control connection may have broken before there was one for data
            asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self._reconnect, member.worker)

    def _is_connected(self, peer: int) -> bool:
        return len(self._established.get(peer, ())) == len(links.KINDS)

    def _reconnect(self, peer: int) -> None:
        self._connecting.discard(peer)
        self.disconnect(peer)  # the membership answers with a command to connect, where it still counts on the peer

    async def _adopt(self, peer: int, kind: links.Kind, sock: socket.socket) -> None:
        if kind == "data" and self._established[peer] == ["data", "control"]:
            self._established[peer] = ["control"]  # the old one is of an attempt whose control connection broke
            self._handle(LinkDown(peer))
        elif kind in self._established[peer]:  # the peer has seen the end of the old connections already
            self.disconnect(peer)
        links.keep_alive(sock, seconds=self._config.detection_seconds)
        if kind == "data":
            self._poller.add(peer, TcpTransport(sock))
        else:
            reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES)
            self._writers[peer] = writer
            self._liveness.record(peer, now=time.monotonic())
            self._spawn(self._read(peer, reader, writer))
        self._established[peer].append(kind)
        if self._is_connected(peer):
            self._handle(LinkUp(peer))

    async def _read(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (line := await reader.readline()) and self._writers.get(peer) is writer:
                self._liveness.record(peer, now=time.monotonic())
                self._on_message(peer, from_peer.validate_json(line))
        except (OSError, ValueError, pydantic.ValidationError):
            pass  # a peer that sends garbage counts as lost
        if self._writers.get(peer) is writer:
            self.disconnect(peer)

    def _on_message(self, peer: int, message: PeerMessage) -> None:
        match message:
            case Order():
                self.on_order(message)
            case StoreEntry():
                self._on_entry(message)
            case Heartbeat(generation=generation) if generation <= self._view().newest:
                pass  # most of them
            case _:
                self._handle(MessageReceived(peer, message))
