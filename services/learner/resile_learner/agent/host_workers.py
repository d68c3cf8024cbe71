"""What an agent does for each worker: it prepares the configuration, buffers the output, and stores the files."""

import asyncio
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from resile_shared.bus.buckets import Bucket
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import WorkerExit
from resile_shared.messages.jobs import JobRecord
from resile_shared.messages.logs import LogLine
from resile_shared.messages.message import at
from resile_shared.messages.pool import PoolSettings
from resile_shared.telemetry.resource import script_variables
from resile_shared.telemetry.traces import environment_of, traced

from ..messages import FromWorker, ReplicaConfig, WorkerConfig
from ..processes.worker_process import Stream
from .events import Event, MessageReceived, StartWorker, WorkerExited
from .folder import AgentFolder
from .host_devices import HostDevices
from .host_templates import HostTemplates, Imports
from .job_datasets import JobDatasets
from .job_environments import JobEnvironments
from .job_files import Outputs
from .packages import Packages, find_script
from .replicas import HostReplicas

logger = logging.getLogger(__name__)

UPLOAD_SECONDS = 30.0
BATCH_LINES = 200
BATCH_BYTES = 512 * 1024  # control characters may take six times as much on the bus
MAX_WAITING_LINES = 5000
MAX_WAITING_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class WorkerContext:
    """What all workers of a host have in common."""

    host: str
    folder: AgentFolder
    storage: str
    address: str
    location: tuple[str, ...]
    devices: HostDevices
    packages: Packages
    environments: JobEnvironments
    datasets: JobDatasets
    outputs: Outputs
    jobs: Bucket[JobRecord]
    pool: PoolSettings

    def storage_of(self, job: str) -> str:
        """The URL of the job's folder in object storage."""
        return f"{self.storage.rstrip('/')}/jobs/{job}"


class HostWorkers:
    """Prepares and observes the workers of one incarnation; posts what they do as events of the core."""

    def __init__(
        self, context: WorkerContext, templates: HostTemplates, replicas: HostReplicas, post: Callable[[Event], None]
    ) -> None:
        self._context = context
        self.replicas = replicas
        self._templates = templates
        self._post = post
        self.lines: defaultdict[tuple[str, int | None], LogBuffer] = defaultdict(LogBuffer)
        """Lines that workers and builds printed and that are not sent yet, by job and worker."""
        self.has_lines = asyncio.Event()

    async def prepare(self, start: StartWorker) -> WorkerConfig:
        """Fetch what a worker needs; return its configuration once it can be forked. Raises ResileError, OSError."""
        logger.info("starting worker job=%s worker=%s slot=%s", start.job, start.worker, start.slot)
        with traced("prepare worker", job=start.job, worker=start.worker, slot=start.slot) as span:
            config, imports = await self._configure(start, environment_of(span))
        if config.replica:
            self.replicas.add(start.job, start.worker, config.replica)
            return config
        if config.gang:  # what its script imports may depend on its place
            return config
        return await self._templates.choose(config, imports)

    async def _configure(self, start: StartWorker, trace: Mapping[str, str]) -> tuple[WorkerConfig, Imports]:
        context = self._context
        entry = await context.jobs.get(start.job)
        if entry is None:
            raise ResileError(f"no record of job {start.job} is stored")
        slots = context.devices.slots
        if start.slot >= len(slots):
            raise ResileError(f"this host has no slot {start.slot}: its slots are 0 to {len(slots) - 1}")
        spec = entry.value.spec
        package = context.folder.code(start.job)
        await context.packages.unpack(spec.package, package)
        storage = context.storage_of(start.job)
        on_line = partial(self.on_line, start.job, start.worker, "stderr")
        data = await context.datasets.get(
            start.job, start.worker, spec.data, storage=storage, mounts=spec.mounts, on_line=on_line
        )
        environment = await context.environments.get(storage, spec.requirements, on_line)
        variables = {
            "TORCHINDUCTOR_CACHE_DIR": str(package / ".torchinductor"),  # shared by the job's workers, and goes with it
            **data,
            **trace,
            **script_variables(spec.name, self._resource(start)),
            **spec.env,
            "RESILE_OUTPUT_DIR": str(context.folder.make_output(start.job)),
            **context.devices.environment(*(slots[number] for number in _visible_slots(start))),
        }
        config = WorkerConfig(
            job=start.job,
            worker=start.worker,
            script=str(find_script(package, spec.script)),
            args=spec.args,
            env=variables,
            environment=environment.folder,
            packages=environment.packages,
            directory=str(package),
            host=context.address,
            location=context.location,
            storage=storage,
            gang=start.gang,
            replica=ReplicaConfig(service=spec.service, secret=secrets.token_hex(16)) if spec.service else None,
            detection_seconds=context.pool.detection_seconds,
        )
        imports = Imports(spec.package, config.script, spec.script, config.directory, environment.folder, spec.env)
        return config, imports

    def _resource(self, start: StartWorker) -> dict[str, str | int]:
        """Return what tells a script's own telemetry from that of others."""
        instance = f"{start.job}-{start.worker}"
        return {
            "service.namespace": "resile",
            "service.instance.id": instance,
            "resile.job": start.job,
            "resile.worker": start.worker,
            "resile.host": self._context.host,
        }

    def on_message(self, job: str, message: FromWorker) -> None:
        """Post a worker's message."""
        self._post(MessageReceived(job, message))

    def on_line(self, job: str, worker: int | None, stream: Stream, line: str) -> None:
        """Buffer a line that a worker printed, or, if ``worker`` is None, the build of the job's environment."""
        self.lines[job, worker].add(LogLine(time=at(time.time()), stream=stream, text=line))
        self.has_lines.set()

    def on_log_error(self, job: str, worker: int, error: OSError) -> None:
        """Log that a worker's log cannot be written."""
        logger.warning("what worker %s of job %s prints is not kept any more: %s", worker, job, error.strerror)

    async def on_exit(self, job: str, worker: int, exit_: WorkerExit) -> None:
        """Store the files of a worker whose part is complete, or else add to its log why it ended; post its exit."""
        self._context.datasets.release(job, worker)
        reason = exit_.describe(f"worker {worker}")
        logger.info("worker exited job=%s worker=%s: %s", job, worker, reason)
        if exit_.kind in ("finished", "left"):
            await self.upload_output(job)
            for line in self._context.outputs.take_refused(job):
                self.on_line(job, worker, "stderr", line)
        else:
            for line in (exit_.details or reason).splitlines():
                self.on_line(job, worker, "stderr", line)
        self._post(WorkerExited(job, worker, exit_))

    async def upload_output(self, job: str) -> bool:
        """Upload what workers of ``job`` wrote since the last upload; return whether all of it is stored now."""
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                return await self._context.outputs.upload(job, self._context.folder.output(job))
        except TimeoutError:
            logger.warning("the output of job %s is not stored yet: it takes over %g seconds", job, UPLOAD_SECONDS)
            return False


def _visible_slots(start: StartWorker) -> tuple[int, ...]:
    """The slots whose accelerators a worker sees: its own, or in a gang all slots of the gang here, by local rank."""
    return start.gang.local_slots if start.gang else (start.slot,)


class LogBuffer:
    """The newest lines of one worker that are not sent yet. The oldest are dropped beyond the limits, and counted."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque()
        self._bytes = 0
        self._dropped = 0

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._lines)

    def add(self, line: LogLine) -> None:
        """Add a line."""
        self._lines.append(line)
        self._bytes += _size(line)
        while len(self._lines) > MAX_WAITING_LINES or self._bytes > MAX_WAITING_BYTES:
            self._bytes -= _size(self._lines.popleft())
            self._dropped += 1

    def take(self) -> tuple[tuple[LogLine, ...], int]:
        """Remove the next batch; return its lines, and how many were dropped before them."""
        batch: list[LogLine] = []
        room = BATCH_BYTES
        while self._lines and len(batch) < BATCH_LINES and (room >= _size(self._lines[0]) or not batch):
            batch.append(self._lines.popleft())
            room -= _size(batch[-1])
        self._bytes -= sum(map(_size, batch))
        dropped, self._dropped = self._dropped, 0
        return tuple(batch), dropped

    def put_back(self, lines: tuple[LogLine, ...], dropped: int) -> None:
        """Put back a batch that could not be sent, as far as there is room."""
        newer, self._lines = self._lines, deque()
        self._bytes, self._dropped = 0, self._dropped + dropped
        for line in (*lines, *newer):
            self.add(line)


def _size(line: LogLine) -> int:
    return len(line.text) + 64
