"""Runs workers to their end: each is prepared, forked, followed, and its exit reported."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from resile_shared.errors import ResileError
from resile_shared.messages.hosts import WorkerExit

from ..messages import FromWorker, Order, Pause, Stop, WorkerConfig
from ..preparation import PreparationFailed
from .fork_servers import ForkServers
from .worker_log import WorkerLog, worker_log
from .worker_process import MalformedMessageError, Stream, WorkerProcess

logger = logging.getLogger(__name__)

Key = tuple[str, int]


class WorkerObserver(Protocol):
    """Is called with everything that workers do. What it raises surfaces in `WorkerRunner.fault`."""

    def on_message(self, job: str, message: FromWorker) -> None:
        """Handle a message from a worker of ``job``."""

    def on_line(self, job: str, worker: int, stream: Stream, line: str) -> None:
        """Handle a line that a worker printed."""

    def on_log_error(self, job: str, worker: int, error: OSError) -> None:
        """Handle that no more lines of a worker can be kept in its log. Its `on_line` calls continue."""

    async def on_exit(self, job: str, worker: int, exit_: WorkerExit) -> None:
        """Handle the end of a worker, or that it could not be started. Called last, exactly once for each start."""


@dataclass
class _Run:
    job: str
    worker: int
    preparing: "asyncio.Task[WorkerConfig]"
    log_folder: Path
    process: WorkerProcess | None = None
    is_killed: bool = False


class WorkerRunner:
    """The workers of one host. All methods but `wait_closed` return at once."""

    def __init__(self, fork_servers: ForkServers, observer: WorkerObserver) -> None:
        self._fork_servers = fork_servers
        self._observer = observer
        self._runs: dict[Key, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that never has a result; it raises the first error that is not the end of a worker but a bug."""

    @property
    def workers(self) -> set[Key]:
        """The workers that were started and have not ended, by job and worker; also those that are prepared."""
        return set(self._runs)

    @property
    def pids(self) -> dict[Key, int]:
        """Process ids of the workers that run, by job and worker."""
        return {key: pid for key, run in self._runs.items() if run.process and (pid := run.process.running_pid)}

    def start(self, job: str, worker: int, prepare: Coroutine[Any, Any, WorkerConfig], *, log_folder: Path) -> None:
        """Start a worker with the configuration that ``prepare`` returns, keeping what it prints in ``log_folder``."""
        run = self._runs[job, worker] = _Run(job, worker, asyncio.create_task(prepare), log_folder)
        task = asyncio.create_task(self._run(run))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def send(self, job: str, worker: int, message: Order | Pause | Stop) -> None:
        """Send a message; it is dropped if the worker does not run."""
        run = self._runs.get((job, worker))
        if run and run.process:
            run.process.send(message)

    def kill(self, job: str, worker: int) -> None:
        """Kill a worker at once, or cancel its start; no effect on one that has ended."""
        if run := self._runs.get((job, worker)):
            run.is_killed = True
            run.preparing.cancel()
            if run.process:
                run.process.kill()

    async def wait_closed(self) -> None:
        """Wait until every exit is handled; to be called when the fork servers have ended."""
        for run in self._runs.values():
            run.preparing.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.fault.done():
            self.fault.set_exception(error)

    async def _run(self, run: _Run) -> None:
        try:
            exit_ = await self._run_process(run)
        finally:
            del self._runs[run.job, run.worker]
        await self._observer.on_exit(run.job, run.worker, exit_)

    async def _run_process(self, run: _Run) -> WorkerExit:
        await asyncio.wait({run.preparing})
        if run.preparing.cancelled():
            return WorkerExit(kind="not started", message="it was not needed any more")
        if error := run.preparing.exception():
            return _not_started(run, error)
        try:
            config = run.preparing.result()
            fork_server = await self._fork_servers.get(config.environment)
            running = {worker for job, worker in self._runs if job == run.job}
            with worker_log(run.log_folder, run.worker, running=running) as log:
                run.process = await fork_server.fork(config, partial(self._on_line, run, log))
                if run.is_killed:  # since it was prepared
                    run.process.kill()
                return await self._follow(run.job, run.process)
        except (ResileError, OSError) as error:
            return WorkerExit(kind="not started", message=_line(error))

    async def _follow(self, job: str, process: WorkerProcess) -> WorkerExit:
        try:
            async for message in process.messages():
                self._observer.on_message(job, message)
                await asyncio.sleep(0)  # a worker that sends without end takes no more than its turn
        except MalformedMessageError as error:
            process.kill()
            exit_ = await process.wait()
            return WorkerExit(kind="failed", status=exit_.status, message=str(error))
        return await process.wait()

    def _on_line(self, run: _Run, log: WorkerLog, stream: Stream, line: str) -> None:
        try:
            log.write(line)
        except OSError as error:  # a full disk: training goes on
            self._observer.on_log_error(run.job, run.worker, error)
        self._observer.on_line(run.job, run.worker, stream, line)


def _not_started(run: _Run, error: BaseException) -> WorkerExit:
    """The exit of a worker whose preparation failed. No job may end its host, so this also covers unexpected errors."""
    if isinstance(error, PreparationFailed) and not error.is_hosts_fault:
        return WorkerExit(kind="failed", message=_line(error))
    if isinstance(error, ResileError | OSError):
        return WorkerExit(kind="not started", message=_line(error))
    logger.error("preparing worker failed job=%s worker=%s", run.job, run.worker, exc_info=error)
    return WorkerExit(kind="not started", message=f"its preparation failed: {_line(error) or repr(error)}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
