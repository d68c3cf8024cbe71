"""The workers of one incarnation as processes: prepared, forked, heard, and each told of once it is over."""

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resile_shared.buckets import Bucket
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import Slot, WorkerExit
from resile_shared.messages.jobs import JobRecord
from resile_shared.messages.logs import LogLine
from resile_shared.messages.message import at
from resile_shared.messages.pool import PoolSettings
from resile_shared.telemetry import traced

from ..messages import Order, Pause, WorkerConfig
from ..processes.client import ForkServerClient
from ..processes.worker_log import WorkerLog, worker_log
from ..processes.worker_process import MalformedMessageError, Stream, WorkerProcess
from .events import Event, Exited, Garbled, Said, Start
from .folder import AgentFolder
from .logs import WaitingLines
from .machine import slot_environment
from .outputs import Outputs
from .packages import Packages, find_script

logger = logging.getLogger(__name__)

UPLOAD_SECONDS = 30.0
Key = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """Where workers live: what is the same for all of them."""

    folder: AgentFolder
    storage: str
    address: str
    slots: tuple[Slot, ...]
    packages: Packages
    outputs: Outputs
    jobs: Bucket[JobRecord]
    pool: PoolSettings


class Processes:
    """Starts, hears and ends workers. All that happens is posted as events of the core."""

    def __init__(self, fork_server: ForkServerClient, place: Place, post: Callable[[Event], None]) -> None:
        self._fork_server = fork_server
        self._place = place
        self._post = post
        self._preparing: dict[Key, asyncio.Task[WorkerConfig]] = {}
        self._running: dict[Key, WorkerProcess] = {}
        self._packages: dict[Key, Path] = {}
        self._unneeded: set[Key] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what should never happen."""
        self.lines: defaultdict[Key, WaitingLines] = defaultdict(WaitingLines)
        """What workers printed and nobody has sent yet."""
        self.has_lines = asyncio.Event()

    @property
    def packages(self) -> set[Path]:
        """The unpacked packages in use."""
        return set(self._packages.values())

    def start(self, start: Start) -> None:
        """Start a worker; it has ended, or could not be started, when `Exited` is posted."""
        task = asyncio.create_task(self._live(start))
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def send(self, job: str, worker: int, message: Order | Pause) -> None:
        """Tell a worker; one that is gone hears nothing."""
        if process := self._running.get((job, worker)):
            process.send(message)

    def kill(self, job: str, worker: int) -> None:
        """End a worker at once, or its start."""
        key = (job, worker)
        self._unneeded.add(key)
        if key in self._preparing:
            self._preparing[key].cancel()
        elif key in self._running:
            self._running[key].kill()

    async def ended(self) -> None:
        """Wait until all is told of workers that have ended; to be called when the fork server has ended."""
        for preparing in self._preparing.values():
            preparing.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.fault.done():
            self.fault.set_exception(error)

    async def _live(self, start: Start) -> None:
        job, worker = start.job, start.worker
        logger.info("job %s: starting worker %s on slot %s", job, worker, start.slot)
        exit_ = await self._train(start)
        self._unneeded.discard((job, worker))
        logger.info("job %s: %s", job, exit_.describe(f"worker {worker}"))
        if exit_.kind in ("finished", "left"):
            await self.upload_output(job)
        self._post(Exited(job, worker, exit_))

    async def upload_output(self, job: str) -> bool:
        """Upload what workers of ``job`` wrote and is not stored yet; tell whether all of it is stored now."""
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                return await self._place.outputs.upload(job, self._place.folder.output(job))
        except TimeoutError:
            logger.warning("the output of job %s is not stored yet: it takes over %g seconds", job, UPLOAD_SECONDS)
            return False

    async def _train(self, start: Start) -> WorkerExit:
        """Run a worker to its end."""
        key = (start.job, start.worker)
        preparing = self._preparing[key] = asyncio.create_task(self._prepare(start))
        await asyncio.wait({preparing})
        del self._preparing[key]
        if preparing.cancelled():
            return WorkerExit(kind="not started", message="it was not needed any more")
        try:
            config = preparing.result()
            with worker_log(self._place.folder.job(start.job), start.worker) as log:
                process = await self._fork_server.fork(
                    config, lambda stream, line: self._printed(key, log, stream, line)
                )
                self._running[key], self._packages[key] = process, Path(config.directory)
                if key in self._unneeded:  # since it was prepared
                    process.kill()
                exit_ = await self._hear(start.job, process)
                del self._running[key], self._packages[key]
        except (ResileError, OSError) as error:
            return WorkerExit(kind="not started", message=" ".join(str(error).split()))
        return exit_

    async def _hear(self, job: str, process: WorkerProcess) -> WorkerExit:
        """Post all that a worker says, until it is gone."""
        try:
            async for message in process.messages():
                self._post(Said(job, message))
        except MalformedMessageError as error:
            self._post(Garbled(job, process.worker, str(error)))
            process.kill()
        return await process.wait()

    async def _prepare(self, start: Start) -> WorkerConfig:
        with traced("prepare worker", job=start.job, worker=start.worker, slot=start.slot):
            return await self._configure(start)

    async def _configure(self, start: Start) -> WorkerConfig:
        place = self._place
        entry = await place.jobs.get(start.job)
        if entry is None:
            raise ResileError(f"nothing is stored of job {start.job}")
        if start.slot >= len(place.slots):
            raise ResileError(f"this host has no slot {start.slot}: its slots are 0 to {len(place.slots) - 1}")
        spec = entry.value.spec
        package = await place.packages.fetch(spec.package)
        environment = {
            **spec.env,
            "RESILE_OUTPUT_DIR": str(place.folder.output(start.job)),
            **slot_environment(place.slots[start.slot], os.environ),
        }
        return WorkerConfig(
            job=start.job,
            worker=start.worker,
            script=str(find_script(package, spec.script)),
            args=spec.args,
            env=environment,
            directory=str(package),
            host=place.address,
            storage=f"{place.storage.rstrip('/')}/jobs/{start.job}",
            resume=start.resume,
            detection_seconds=place.pool.detection_seconds,
        )

    def _printed(self, key: Key, log: WorkerLog, stream: Stream, line: str) -> None:
        try:
            log.write(line)
        except OSError as error:  # a full disk: training goes on
            logger.warning("what worker %s of job %s prints is not kept any more: %s", key[1], key[0], error.strerror)
        self.lines[key].add(LogLine(time=at(time.time()), stream=stream, text=line))
        self.has_lines.set()
