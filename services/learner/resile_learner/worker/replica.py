"""A replica of a service: it makes an object of the user's class, and answers the requests that its agent passes on.

To the scheduler it is a member without peers. It has no links, no rounds and no state to hand over:

- It reports its address once the object is made, so that a generation waits for that.
- A generation takes effect as soon as it is ordered. Its number takes the place of the iteration.
- One that does not name it makes it leave: the agent sends no more requests, and closes their connection when the last
  one is answered.
"""

import asyncio
import hmac
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NoReturn

import orjson

from resile_shared.calls import IDEMPOTENT, MAX_CALL_BYTES, CallHead, ReplicaHead, ReplyHead, Status, frame, read_frame
from resile_shared.errors import UsageError
from resile_shared.messages.jobs import MAX_WORKERS

from ..messages import (
    Joined,
    Left,
    Order,
    Pause,
    Ready,
    ReplicaConfig,
    Switched,
    WorkerConfig,
    WorkerListening,
)
from .agent_connection import AgentConnection
from .failure import failed, raised

BITS = "not promised: a service trains nothing"
CONNECT_SECONDS = 10.0


def run_as_replica(config: WorkerConfig, replica: ReplicaConfig, agent: socket.socket) -> NoReturn:
    """Serve the class of ``replica`` until an order, the agent or an error ends it; then end the process."""
    connection = AgentConnection(agent)
    try:
        served = _load(config, replica.service.class_name)()
    except BaseException as error:
        unusual = isinstance(error, SystemExit) and error.code in (None, 0)
        outcome = failed(config, "the script ended itself while it was loaded") if unusual else raised(config, error)
        connection.send(outcome)
        _end(connection, status=1)
    membership = _Membership(config.worker, connection)
    asyncio.run(_serve(config, replica, served, connection, membership))
    raise AssertionError("a replica that has served has ended")


def _load(config: WorkerConfig, class_name: str) -> Callable[[], Any]:
    """Import the job's script as a module; return the class. Raises UsageError, and what the script raises."""
    folder, name = os.path.split(config.script)
    sys.argv = [config.script, *config.args]
    sys.path.insert(0, folder)
    spec = spec_from_file_location(os.path.splitext(name)[0], config.script)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UsageError(f"{name} has no class {class_name}: name it as in `resile serve {name}:CLASS`")
    return found


def _end(connection: AgentConnection, *, status: int) -> NoReturn:
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Membership:
    """What the replica reports of the generations that it is ordered to form."""

    def __init__(self, worker: int, connection: AgentConnection) -> None:
        self._worker = worker
        self._connection = connection
        self._generation = 0

    def on_order(self, order: Order | Pause) -> None:
        """Report that a generation has taken effect; its lowest rank does so for all."""
        if isinstance(order, Pause) or order.generation <= self._generation or self._worker not in order.workers:
            return
        number = self._generation = order.generation
        if order.workers[0] == self._worker:
            self._connection.send(
                Switched(worker=self._worker, generation=number, workers=order.workers, iteration=number)
            )
        else:
            self._connection.send(Joined(worker=self._worker, generation=number, iteration=number))

    def leave(self) -> None:
        """Report that all its requests are answered."""
        number = self._generation
        self._connection.send(Left(worker=self._worker, generation=number, iteration=number))


async def _serve(
    config: WorkerConfig, replica: ReplicaConfig, served: Any, connection: AgentConnection, membership: _Membership
) -> None:
    """Answer requests until the agent closes their connection; then leave, whatever still runs here."""
    requests = Requests(served, concurrency=replica.service.concurrency)
    has_ended = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                secret = await reader.readexactly(len(replica.secret))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        if not hmac.compare_digest(secret, replica.secret.encode()):
            writer.close()
            return
        await requests.answer_all(reader, writer)
        has_ended.set()

    server = await asyncio.start_server(accept, config.host, 0)
    port = server.sockets[0].getsockname()[1]
    connection.send(WorkerListening(worker=config.worker, host=config.host, port=port))
    connection.send(_ready(config))
    threading.Thread(target=connection.obey, args=(membership.on_order,), name="resile-agent", daemon=True).start()
    await has_ended.wait()
    membership.leave()
    _end(connection, status=0)


def _ready(config: WorkerConfig) -> Ready:
    return Ready(
        worker=config.worker,
        iterations_total=0,
        num_shards=MAX_WORKERS,
        batch_size=1,
        epochs=0,
        samples=0,
        bits=BITS,
        has_fixed_length=False,
    )


class Requests:
    """Calls methods of the object, at most ``concurrency`` at a time."""

    def __init__(self, served: Any, *, concurrency: int) -> None:
        self._served = served
        self._slots = asyncio.Semaphore(concurrency)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="request")
        self._running: set[asyncio.Task[None]] = set()
        self._until = 0.0
        """The latest deadline of all requests."""

    async def answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, in any order, until it ends."""
        writer.write(frame(ReplicaHead(idempotent=_idempotent(type(self._served))), b""))
        while (found := await read_frame(reader)) is not None:
            head = CallHead.model_validate_json(found[0])
            deadline = time.monotonic() + head.seconds
            self._until = max(self._until, deadline)
            task = asyncio.create_task(self._answer(head, found[1], writer, deadline=deadline))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        if self._running:  # a method that never returns holds up nobody for longer than its caller waits
            await asyncio.wait(self._running, timeout=max(self._until - time.monotonic(), 0.0))
        writer.close()

    async def _answer(self, head: CallHead, body: bytes, writer: asyncio.StreamWriter, *, deadline: float) -> None:
        async with self._slots:
            if time.monotonic() >= deadline:
                found: tuple[Status, bytes] = "late", b"its time was over before a replica began with it"
            else:
                found = await self._call(head.method, body)
        writer.write(frame(ReplyHead(number=head.number, status=found[0]), found[1]))
        with suppress(ConnectionError):
            await writer.drain()

    async def _call(self, name: str, body: bytes) -> tuple[Status, bytes]:
        method = None if name.startswith("_") else getattr(self._served, name, None)
        if not callable(method):
            return "unknown", f"{type(self._served).__name__} has no method {name!r}".encode()
        try:
            args, named = _arguments(body)
            inspect.signature(method).bind(*args, **named)
        except (TypeError, ValueError) as error:
            return "invalid", f"{name}: {error}".encode()
        if inspect.iscoroutinefunction(method):
            try:
                return _encoded(name, await method(*args, **named))
            except BaseException as error:
                return _failed(error)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _computed, name, method, args, named)


def _computed(name: str, method: Callable[..., Any], args: list[Any], named: dict[str, Any]) -> tuple[Status, bytes]:
    """Call a method in a thread. A future cannot hold all that it may raise, such as SystemExit or StopIteration."""
    try:
        return _encoded(name, method(*args, **named))
    except BaseException as error:
        return _failed(error)


def _failed(error: BaseException) -> tuple[Status, bytes]:
    sys.excepthook(type(error), error, error.__traceback__)
    return "failed", f"{type(error).__name__}: {error}".encode()


def _encoded(name: str, result: Any) -> tuple[Status, bytes]:
    try:
        encoded = orjson.dumps(result, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        return "failed", f"TypeError: {error.__cause__ or error}".encode()
    if len(encoded) > MAX_CALL_BYTES:
        size = f"{len(encoded)} bytes of JSON, and at most {MAX_CALL_BYTES} are possible"
        return "too large", f"{name} returned {size}".encode()
    return "ok", encoded


def _idempotent(served: type) -> tuple[str, ...]:
    return tuple(name for name in dir(served) if hasattr(getattr(served, name, None), IDEMPOTENT))


def _arguments(body: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call: an object names them, an array lists them. Raises ValueError."""
    try:
        found = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the arguments are not JSON: {error}") from None
    match found:
        case dict():
            return [], found
        case list():
            return found, {}
        case _:
            raise ValueError("the arguments must be a JSON object, which names them, or an array, which lists them")


def _plain(value: Any) -> Any:
    """Return a result that JSON has no form for as one that it has; tensors become arrays."""
    if hasattr(value, "detach") and hasattr(value, "tolist"):
        return value.detach().tolist()
    if hasattr(value, "tolist"):
        return value.tolist()
    kind = type(value).__name__
    raise TypeError(f"a result of type {kind} has no form in JSON: return numbers, text, lists or arrays")
