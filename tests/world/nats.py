"""A client of the simulated server, in place of ``nats.aio.client.Client`` below `resile_shared.bus.connection`.

The connection to the server is a pair of ordered pipes with a delay. A pipe that is cut holds what is sent until it is
whole again; the client gives up after `DEAF_SECONDS`, and what was on its way is lost.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from nats.errors import ConnectionClosedError, NoRespondersError

from .loop import Process, SimLoop, current_process
from .server import Message, SimServer

RECONNECT_SECONDS = 0.25
DEAF_SECONDS = 10.0
Callback = Callable[[Message], Awaitable[None]]


class Pipe:
    """One direction of a connection: whole or cut, and in order."""

    def __init__(self, loop: SimLoop, delay: Callable[[], float]) -> None:
        self._loop = loop
        self._delay = delay
        self._last = 0.0
        self.is_cut = False
        self.held: deque[tuple[Callable[..., object], tuple[Any, ...], Any]] = deque()

    def send(self, receive: Callable[..., object], *args: Any, context: Any = None) -> None:
        if self.is_cut:
            self.held.append((receive, args, context))
            return
        self._last = max(self._last, self._loop.now + self._delay())
        self._loop.call_at(self._last, receive, *args, context=context)

    def heal(self) -> None:
        self.is_cut = False
        held, self.held = self.held, deque()
        for receive, args, context in held:
            self.send(receive, *args, context=context)


class Network:
    """The paths between hosts and the bus: which are cut, in which direction, and how slow they are."""

    def __init__(self, loop: SimLoop, server: SimServer, rng: random.Random) -> None:
        self.loop = loop
        self.server = server
        self.rng = rng
        self.cut: set[tuple[str, str]] = set()
        """(host, direction): what that host sends to the bus ("up") or gets from it ("down") does not arrive."""
        self.slow: dict[str, float] = {}
        """Additional seconds for what goes to or from a host, at the most."""
        self.clients: list[SimClient] = []
        self.on_deliver: list[Callable[[str, Message], None]] = []
        """Called with the host and every message that is sent to it, for checks."""

    def delay(self, host: str) -> float:
        return self.rng.uniform(0.0001, 0.002) + self.rng.random() * self.slow.get(host, 0.0)

    def cut_host(self, host: str, *directions: str) -> None:
        for direction in directions or ("up", "down"):
            self.cut.add((host, direction))
        for client in self.clients:
            client.follow_network()

    def heal_host(self, host: str) -> None:
        self.cut = {item for item in self.cut if item[0] != host}
        for client in self.clients:
            client.follow_network()


class SimSubscription:
    """One subscription of one client. Its callback gets one message at a time."""

    def __init__(self, client: "SimClient", subject: str, queue: str, callback: Callback) -> None:
        self.client = client
        self.subject = subject
        self.queue = queue
        self.number = 0
        self._callback = callback
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def put(self, message: Message) -> None:
        self._inbox.put_nowait(message)

    async def unsubscribe(self) -> None:
        self._task.cancel()
        self.client.unsubscribe(self)

    async def _run(self) -> None:
        while True:
            message = await self._inbox.get()
            try:
                await self._callback(message)
            except Exception as error:
                await self.client.on_error(error)


class SimClient:
    """The part of the library's client that `Connection` uses."""

    def __init__(self, network: Network) -> None:
        process = current_process()
        assert process is not None
        self.network = network
        self.process: Process = process
        self.is_connected = False
        self.is_closed = False
        self._subscriptions: list[SimSubscription] = []
        self._by_number: dict[int, SimSubscription] = {}
        self._replies: dict[str, asyncio.Future[Message]] = {}
        self._number = 0
        self._generation = 0
        host = process.host
        loop = network.loop
        self._up = Pipe(loop, lambda: network.delay(host))
        self._down = Pipe(loop, lambda: network.delay(host))
        self.name = f"c{len(network.clients)}x{network.rng.getrandbits(32):08x}"
        self._prefix = "_INBOX"
        self._context: Any = None
        network.clients.append(self)
        network.server.on_stop.append(self._on_server_stopped)
        process.on_death.append(self._on_death)

    # what `Connection` calls

    async def connect(self, url: str, **options: Any) -> None:
        self._prefix = options["inbox_prefix"]
        self.on_error = options["error_cb"]
        self._on_lost = options["disconnected_cb"]
        self._on_return = options["reconnected_cb"]
        self._on_closed = options["closed_cb"]
        self.follow_network()
        await self._wait_until_reachable()
        self._connect()

    async def publish(
        self, subject: str, body: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        if self.is_closed:
            raise ConnectionClosedError
        if self.is_connected:
            self._up.send(self._arrive, self._generation, subject, body, headers, reply)

    async def request(
        self,
        subject: str,
        body: bytes,
        timeout: float,
        headers: dict[str, str] | None = None,
    ) -> Message:
        self._number += 1
        reply = f"{self._prefix}.{self.name}.r{self._number}"
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._replies[reply] = future
        try:
            await self.publish(subject, body, reply=reply, headers=headers)
            async with asyncio.timeout(timeout):
                message = await future
        finally:
            del self._replies[reply]
        if message.headers and message.headers.get("Status") == "503":
            raise NoRespondersError
        return message

    async def subscribe(self, subject: str, queue: str = "", cb: Callback | None = None) -> SimSubscription:
        assert cb is not None
        subscription = SimSubscription(self, subject, queue, cb)
        self._subscriptions.append(subscription)
        if self.is_connected:
            self._up.send(self._subscribe, self._generation, subscription)
        return subscription

    def unsubscribe(self, subscription: SimSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        self._by_number.pop(subscription.number, None)
        self._up.send(self._unsubscribe, self._generation, subscription)

    def new_inbox(self) -> str:
        self._number += 1
        return f"{self._prefix}.{self.name}.i{self._number}"

    async def flush(self) -> None:
        await asyncio.sleep(0.002)

    async def drain(self) -> None:
        await self.close()

    async def close(self) -> None:
        if not self.is_closed:
            self._up.send(self._disconnect, self._generation)
            self.is_closed, self.is_connected = True, False
            self._leave()
            await self._on_closed()

    # the connection

    def follow_network(self) -> None:
        """Cut or heal the pipes as the network says."""
        host = self.process.host
        for pipe, direction in ((self._up, "up"), (self._down, "down")):
            is_cut = (host, direction) in self.network.cut
            if is_cut and not pipe.is_cut:
                pipe.is_cut = True
                self.network.loop.call_later(DEAF_SECONDS, self._give_up, self._generation)
            elif pipe.is_cut and not is_cut:
                pipe.heal()

    def deliver(self, number: int, message: Message) -> None:
        """Take a message from the server."""
        for call in self.network.on_deliver:
            call(self.process.host, message)
        self._down.send(self._receive, self._generation, number, message, context=self._context)

    def _can_connect(self) -> bool:
        return self.network.server.is_up and not self._up.is_cut and not self._down.is_cut

    def _connect(self) -> None:
        self._generation += 1
        self.is_connected = True
        self._context = self.process.context()
        self._up.send(self._subscribe, self._generation, None)
        for subscription in self._subscriptions:
            self._up.send(self._subscribe, self._generation, subscription)

    def _arrive(self, generation: int, subject: str, body: bytes, headers: dict[str, str] | None, reply: str) -> None:
        server = self.network.server
        if generation != self._generation or not server.is_up:
            return
        if not server.receive(subject, body, headers, reply) and reply:
            self.deliver(self._reply_number, Message(reply, b"", {"Status": "503"}))

    def _subscribe(self, generation: int, subscription: SimSubscription | None) -> None:
        server = self.network.server
        if generation != self._generation or not server.is_up:
            return
        if subscription is None:
            self._reply_number = server.subscribe(self, f"{self._prefix}.{self.name}.*", "")
        elif subscription in self._subscriptions:
            subscription.number = server.subscribe(self, subscription.subject, subscription.queue)
            self._by_number[subscription.number] = subscription

    def _unsubscribe(self, generation: int, subscription: SimSubscription) -> None:
        if generation == self._generation:
            self.network.server.unsubscribe(subscription.number)

    def _disconnect(self, generation: int) -> None:
        if generation == self._generation:
            self.network.server.disconnect(self)

    def _receive(self, generation: int, number: int, message: Message) -> None:
        if generation != self._generation or not self.is_connected:
            return
        subscription = self._by_number.get(number)
        if subscription is not None:
            subscription.put(message)
        elif (future := self._replies.get(message.subject)) and not future.done():
            future.set_result(message)

    # outages

    def _on_server_stopped(self) -> None:
        if self.is_connected:
            self._lose()

    def _give_up(self, generation: int) -> None:
        if generation == self._generation and self.is_connected and not self._can_connect():
            self.network.server.disconnect(self)
            self._lose()

    def _lose(self) -> None:
        self.is_connected = False
        self._generation += 1
        self._up.held.clear()
        self._down.held.clear()
        self._by_number.clear()
        self.process.spawn(self._reconnect())

    async def _reconnect(self) -> None:
        await self._on_lost()
        await self._wait_until_reachable()
        if not self.is_closed:
            self._connect()
            await self._on_return()

    async def _wait_until_reachable(self) -> None:
        while not (self.is_closed or self._can_connect()):  # noqa: ASYNC110 - as the library does
            await asyncio.sleep(RECONNECT_SECONDS * self.network.rng.uniform(0.8, 1.2))

    def _on_death(self) -> None:
        self.network.server.disconnect(self)
        self.is_connected = False
        self._leave()

    def _leave(self) -> None:
        if self in self.network.clients:
            self.network.clients.remove(self)
            self.network.server.on_stop.remove(self._on_server_stopped)
