"""Runs a pool on this machine: starts its processes, starts again what dies, and ends them in order.

All of them die with this process. A pool that was killed at any moment is taken up by the next one in its home: what
was accepted is in the stores of the bus.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from resile_shared.errors import ResileError
from resile_shared.storage import MissingObjectError, ObjectStorage

from ..client import Client, Server
from .home import PoolHome
from .namespaces import Namespaces
from .process import ServiceProcess, ending
from .services import PoolOptions, Services

START_SECONDS = 120.0
SUSPEND_SECONDS = 30.0
LONG_LIFE_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
MAX_LOG_BYTES = 10 << 20
_LOG_CHECK_SECONDS = 10.0
_SUSPEND_POLL_SECONDS = 0.2

Tell = Callable[[str], None]


class Startable(Protocol):
    """A process that can be started again: a `ServiceProcess`, or nats-server."""

    async def start(self) -> None:
        """Return when it is ready."""

    async def wait(self) -> int:
        """Wait until it has ended; return its exit status."""

    async def stop(self) -> None:
        """End it; return when it is gone."""


class Supervisor:
    """One pool in one home."""

    def __init__(self, home: PoolHome, options: PoolOptions, *, tell: Tell) -> None:
        self._home = home
        self._options = options
        self._tell = tell
        self._namespaces = _namespaces(home, options) if options.namespaces else None
        self._plan = Services(home, options, self._namespaces)
        self._bus = self._plan.bus
        self._services: list[ServiceProcess] = []
        self._agents: list[ServiceProcess] = []
        self._url = ""

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Run until cancelled, then drain; a second cancellation leaves the rest to `kill`.

        ``on_ready`` is called with the URL of the API. Raises ResileError when the pool cannot start.
        """
        try:
            self._url = await self._start()
            storage = self._home.storage(self._options.storage)
            self._home.announce(self._url, storage=storage, chaos=self._options.open_to_chaos)
            on_ready(self._url)
            await self._keep()
        finally:
            await self._drain()

    def pids(self) -> set[int]:
        """Return the ids of the pool's processes, of those that have just ended too."""
        started = (self._bus.process, *(process.process for process in (*self._agents, *self._services)))
        return {process.pid for process in started if process is not None}

    def kill_host(self, name: str) -> None:
        """``kill -9`` the agent of a host, whose workers die with it. It is started again like whatever dies."""
        for process in self._agents:
            if process.name == name:
                process.send_kill()

    async def kill(self) -> None:
        """End at once what is left."""
        await asyncio.gather(*(process.kill() for process in (*self._agents, *self._services)))
        if self._bus.process is not None and self._bus.process.returncode is None:
            self._bus.process.kill()
            await self._bus.process.wait()
        if self._namespaces is not None:
            self._namespaces.remove(self._home.path)

    async def _start(self) -> str:
        storage = self._home.storage(self._options.storage)
        await self._bus.start()
        await asyncio.to_thread(_mark_storage, storage)
        monitor = ServiceProcess(self._plan.monitor(port=self._first_port()))
        self._services = [ServiceProcess(self._plan.registry()), ServiceProcess(self._plan.scheduler()), monitor]
        self._agents = [ServiceProcess(spec) for spec in self._plan.agents()]
        await _start_all([*self._services, *self._agents])
        url = self._home.api_file.read_text()
        port = urlsplit(url).port
        assert port is not None, "the URL of the API has a port"
        monitor.spec = self._plan.monitor(port=port)
        return url

    def _first_port(self) -> int:
        """The port that was asked for; else the one that clients know from last time, if it is still free."""
        return self._options.port or self._home.last_free_port(self._options.listen)

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(keep(self._bus, "nats-server", self._tell))
            for process in (*self._services, *self._agents):
                group.create_task(keep(process, process.name, self._tell))
            group.create_task(keep_logs_small(self._home.path / "logs"))

    async def _drain(self) -> None:
        """End agents, then services, then the bus: each can say its last words to the next."""
        if self._url:
            server = Server(self._url, self._home.token)
            await free_hosts(server, {agent.name for agent in self._agents}, tell=self._tell)
        for stage in (self._agents, self._services, [self._bus]):
            await asyncio.gather(*(process.stop() for process in stage))


def _namespaces(home: PoolHome, options: PoolOptions) -> Namespaces:
    made = Namespaces.create(Services.part_names(options))
    made.save(home.path)
    return made


async def free_hosts(server: Server, names: Set[str], *, tell: Tell) -> None:
    """Have hosts let go of their workers; their jobs carry on elsewhere, or save a checkpoint and wait."""

    async def are_busy(client: Client) -> bool:
        return any(slot.job for host in await client.hosts() if host.id in names for slot in host.slots)

    try:
        async with asyncio.timeout(SUSPEND_SECONDS), Client(server) as client:
            if await are_busy(client):
                for name in sorted(names):
                    await client.drain(name)
            while await are_busy(client):  # noqa: ASYNC110 - what other processes do sets no event
                await asyncio.sleep(_SUSPEND_POLL_SECONDS)
    except (ResileError, TimeoutError) as error:
        tell(f"not every job could save a checkpoint: {str(error) or 'it took too long'}")


async def keep(process: Startable, name: str, tell: Tell) -> None:
    """Start a process again whenever it has ended, for ever; after a short life with a longer pause."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        status = await process.wait()
        pause = FIRST_PAUSE_SECONDS if time.monotonic() - started > LONG_LIFE_SECONDS else pause
        tell(f"{name} {ending(status)}; it is started again in {pause:.1f} s")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        try:
            await process.start()
            tell(f"{name} is back")
        except (ResileError, OSError) as error:
            tell(str(error))


async def _start_all(processes: Iterable[ServiceProcess]) -> None:
    """Start processes side by side. Raises the first failure, or one that names who is late."""
    starting = {asyncio.create_task(process.start()): process.name for process in processes}
    try:
        done, pending = await asyncio.wait(starting, timeout=START_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if pending:
            late = ", ".join(starting[task] for task in pending)
            raise ResileError(f"not ready after {START_SECONDS:.0f} s: {late}; their logs are in the home's logs/")
    finally:
        for task in starting:
            task.cancel()
        await asyncio.wait(starting)


def _mark_storage(url: str) -> None:
    """Put the object there by which hosts see that they share the pool's storage."""
    storage = ObjectStorage(url)
    try:
        storage.read("probe")
    except MissingObjectError:
        storage.create("probe", secrets.token_hex(16).encode())


async def keep_logs_small(folder: Path) -> None:
    """Look after the logs in ``folder``, for ever."""
    while True:
        await asyncio.to_thread(limit_logs, folder)
        await asyncio.sleep(_LOG_CHECK_SECONDS)


def limit_logs(folder: Path) -> None:
    """Move what is in a large log to ``.old``. Services go on appending to the same file."""
    for log in folder.glob("*.log"):
        if log.stat().st_size > MAX_LOG_BYTES:
            with contextlib.suppress(OSError):  # a full disk: the truncation is all the more needed
                shutil.copyfile(log, log.with_suffix(".log.old"))
            os.truncate(log, 0)
