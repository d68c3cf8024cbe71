"""Runs a pool on this machine: starts its processes, restarts those that exit, and stops them in order.

Before it stops anything, all jobs are saved (`saving.py`). All processes die with this one. The next pool in the same
home continues after a kill at any moment: everything that was accepted is stored in the streams and buckets of the bus.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol
from urllib.parse import urlsplit

from resile_shared.errors import ResileError
from resile_shared.log_files import truncate_logs
from resile_shared.storage.objects import MissingObjectError, ObjectStorage
from resile_shared.version import VersionMismatch

from ..client import AsyncClient
from ..http_requests import Server
from .disk import watch_disk
from .home import PoolHome
from .namespaces import Namespaces
from .process import ServiceProcess, describe_exit
from .saving import save_jobs, suspend_over_bus
from .services import PoolOptions, Services
from .worker_processes import has_workers

START_SECONDS = 120.0
BACKOFF_RESET_SECONDS = 30.0
MIN_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0

Log = Callable[[str], None]


class Restartable(Protocol):
    """A process that can be restarted: a `ServiceProcess`, or nats-server."""

    async def start(self) -> None:
        """Return when it is ready."""

    async def wait(self) -> int:
        """Wait until it exits; return its exit status."""

    async def stop(self) -> None:
        """Stop it; return when it has exited."""


class Supervisor:
    """One pool in one home."""

    def __init__(self, home: PoolHome, options: PoolOptions, *, log: Log) -> None:
        self._home = home
        self._options = options
        self._log = log
        self._namespaces = _namespaces(home, options) if options.namespaces else None
        self._specs = Services(home, options, self._namespaces)
        self._bus = self._specs.bus
        self._services: list[ServiceProcess] = []
        self._agents: list[ServiceProcess] = []
        self._url = ""

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Run until cancelled, then save all jobs and stop; a second cancellation leaves the rest to `kill`.

        ``on_ready`` is called with the URL of the API. Raises ResileError when the pool cannot start, and at the end
        when a job was not saved.
        """
        try:
            unsaved = await until_cancelled(self._serve(on_ready), self._save_jobs)
        except Exception:
            await self._stop()
            raise
        await self._stop()
        if unsaved:
            raise ResileError(unsaved)

    def pids(self) -> set[int]:
        """Return the ids of the pool's processes, including those that have just exited."""
        started = (self._bus.process, *(process.process for process in (*self._agents, *self._services)))
        return {process.pid for process in started if process is not None}

    def kill_host(self, name: str) -> None:
        """``kill -9`` the agent of a host, whose workers die with it. It is restarted like any service that exits."""
        for process in self._agents:
            if process.name == name:
                process.send_kill()

    async def kill(self) -> None:
        """Kill all remaining processes."""
        await asyncio.gather(*(process.kill() for process in (*self._agents, *self._services)))
        if self._bus.process is not None and self._bus.process.returncode is None:
            self._bus.process.kill()
            await self._bus.process.wait()
        if self._namespaces is not None:
            self._namespaces.remove(self._home.path)

    async def _serve(self, on_ready: Callable[[str], None]) -> None:
        self._url = await self._start()
        storage = self._home.storage(self._options.storage)
        self._home.announce(self._url, storage=storage, chaos=self._options.open_to_chaos)
        on_ready(self._url)
        await self._supervise()

    async def _start(self) -> str:
        """Start everything; return the URL of the API."""
        storage = self._home.storage(self._options.storage)
        await self._bus.start()
        await asyncio.to_thread(_write_probe, storage)
        monitor = ServiceProcess(self._specs.monitor(port=self._first_port()))
        scheduler = ServiceProcess(self._specs.scheduler(is_first=True))
        registry = ServiceProcess(self._specs.registry())
        self._services = [registry, scheduler, monitor]
        self._agents = [ServiceProcess(spec) for spec in self._specs.agents()]
        await _start_all([registry])  # it stores the settings that the others load
        await _start_all([scheduler, monitor, *self._agents])
        url = self._home.api_file.read_text()
        port = urlsplit(url).port
        assert port is not None, "the URL of the API has a port"
        monitor.spec = self._specs.monitor(port=port)
        scheduler.spec = self._specs.scheduler(is_first=False)
        return url

    def _first_port(self) -> int:
        """The requested port; else the last one, which clients know, if it is still free."""
        return self._options.port or self._home.last_free_port(self._options.listen)

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_running(self._bus, "nats-server", self._log))
            for process in (*self._services, *self._agents):
                group.create_task(keep_running(process, process.name, self._log))
            group.create_task(watch_disk(self._bus, self._log))
            agents = map(self._home.host, self._options.host_names)
            group.create_task(truncate_logs(self._home.path / "logs", *agents))

    async def _save_jobs(self) -> str:
        """Suspend all jobs; return what could not be saved, empty if all is well."""
        if not (self._url or any(has_workers(agent.process) for agent in self._agents)):  # it was just starting
            return ""
        server = Server(self._url or self._home.api_file.read_text(), self._home.token)
        return await save_jobs(server, seconds=self._options.grace_seconds, log=self._log, suspend=self._suspend)

    async def _suspend(self, client: AsyncClient) -> tuple[str, ...]:
        """Suspend all jobs by the API, or without it if its service is not running now."""
        if any(process.name == "monitor" and process.is_running for process in self._services):
            return await client.suspend_all()
        return await suspend_over_bus(self._bus.credentials("monitor"))

    async def _stop(self) -> None:
        """Stop agents, then services, then the bus: each can send its last messages to the next."""
        for stage in (self._agents, self._services, [self._bus]):
            await asyncio.gather(*(process.stop() for process in stage))


def _namespaces(home: PoolHome, options: PoolOptions) -> Namespaces:
    made = Namespaces.create(Services.part_names(options))
    made.save(home.path)
    return made


async def until_cancelled(work: Coroutine[Any, Any, None], then: Callable[[], Awaitable[str]]) -> str:
    """Do ``work`` until this task is cancelled; then return the result of ``then``, during which ``work`` goes on."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
        raise AssertionError("it works until it is cancelled")
    except asyncio.CancelledError:
        return await then()
    finally:
        task.cancel()


async def keep_running(process: Restartable, name: str, log: Log) -> None:
    """Restart a process whenever it exits, with exponential backoff; never returns.

    Raises VersionMismatch if the process is no longer of use: its pool runs another version.
    """
    backoff = MIN_BACKOFF_SECONDS
    while True:
        started = time.monotonic()
        status = await process.wait()
        backoff = MIN_BACKOFF_SECONDS if time.monotonic() - started > BACKOFF_RESET_SECONDS else backoff
        log(f"{name} {describe_exit(status)}, restarting in {backoff:.1f} s")
        while True:
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
            try:
                await process.start()
            except VersionMismatch:
                raise
            except (ResileError, OSError) as error:
                log(f"{name} not restarted: {error}: trying again in {backoff:.1f} s")
            else:
                log(f"{name} restarted")
                break


async def _start_all(processes: Iterable[ServiceProcess]) -> None:
    """Start processes concurrently. Raises the first failure, or an error that names those that are late."""
    starting = {asyncio.create_task(process.start()): process.name for process in processes}
    try:
        done, pending = await asyncio.wait(starting, timeout=START_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if pending:
            late = ", ".join(starting[task] for task in pending)
            raise ResileError(
                f"services not ready after {START_SECONDS:.0f} s: {late}: see their logs in logs/ of the pool's home"
            )
    finally:
        for task in starting:
            task.cancel()
        await asyncio.wait(starting)


def _write_probe(url: str) -> None:
    """Write the object by which hosts check that they share the pool's storage."""
    storage = ObjectStorage(url)
    try:
        storage.read("probe")
    except MissingObjectError:
        storage.create("probe", secrets.token_hex(16).encode())
