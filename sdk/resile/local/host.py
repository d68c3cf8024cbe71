"""The only host of a local run: fork servers, the workers that they start, and what a worker needs before it starts."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from resile_learner.agent import events as agent
from resile_learner.agent.host_devices import (
    VISIBLE_DEVICES,
    HostDevices,
    TorchDevices,
    detect_devices,
    host_devices,
    may_have_accelerators,
)
from resile_learner.agent.host_templates import HostTemplates, Imports
from resile_learner.agent.job_datasets import JobDatasets
from resile_learner.agent.job_environments import JobEnvironments
from resile_learner.datasets.host_datasets import HostDatasets
from resile_learner.environments import Environments
from resile_learner.messages import FromWorker, WorkerConfig
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_learner.processes.fork_servers import ForkServers
from resile_learner.processes.runner import WorkerRunner
from resile_learner.processes.worker_process import Stream
from resile_shared.errors import ResileError
from resile_shared.home import writing
from resile_shared.messages.hosts import HostHello, WorkerExit
from resile_shared.version import VERSION

from .events import Noted
from .in_memory import HostCommand, HostEvent, HostFailed
from .job import LocalJob
from .runs import KERNELS, OUTPUT, Home, RunFolder, kernel_folder
from .settings import RunSettings
from .storage import local_folder

NAME = "local"
MAX_UNLOADED = 3
"""The run fails when this many fork servers in a row end during their imports."""
SLOTS_PER_WORKER = 2
"""Slots for each worker, so that a new one need not wait for the process of an old one to end."""


@dataclass(frozen=True)
class HostObserver:
    """What a host calls with all that happens on it."""

    post: Callable[[HostHello | HostFailed | HostEvent], None]
    print_line: Callable[[int, Stream, str], None]
    """Called with the worker, the stream, and the line that it printed."""
    note: Callable[[Noted], None]


class LocalHost:
    """`start` it, add slots, `keep` it, and `close` it. Each of its fork servers is an incarnation."""

    def __init__(
        self,
        job: LocalJob,
        folder: RunFolder,
        home: Home,
        settings: RunSettings,
        observer: HostObserver,
        *,
        fork_server: ForkServerSettings,
        devices: TorchDevices | None,
    ) -> None:
        """Make a host. ``devices`` are those of its workers; without them, what torch detects."""
        self._job = job
        self._folder = folder
        self._settings = settings
        self._observer = observer
        self._fork_server_settings = replace(
            fork_server, storage=local_folder(job.storage), inherit=(*fork_server.inherit, folder.lock)
        )
        self._torch_devices = devices
        self._builds = Environments(home.environments, variables=os.environ)
        self._environments = JobEnvironments(self._builds)
        self._datasets = JobDatasets(HostDatasets(home.datasets, storage=""))
        with writing(home.path):
            self._kernels = {} if KERNELS in os.environ else {KERNELS: str(kernel_folder(home.path))}
        self._output: dict[str, str] = {}
        if OUTPUT not in os.environ:
            with writing(folder.path):
                folder.output.mkdir(exist_ok=True)
            self._output[OUTPUT] = str(folder.output)
        self._incarnation = 0
        self._num_slots = 0
        self._devices: HostDevices
        self._fork_servers: ForkServers
        self._runner: WorkerRunner
        self._templates: HostTemplates

    @property
    def first_worker(self) -> int:
        """The lowest id of the workers that were started and have not ended; 0 if there are none."""
        return min((worker for _, worker in self._runner.workers), default=0)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the living workers, by worker id."""
        return {worker: pid for (_, worker), pid in self._runner.pids.items()}

    @property
    def warning(self) -> str:
        """What the user should know about its devices; empty: nothing."""
        return self._devices.warning

    async def start(self) -> None:
        """Start its fork server, and find out which devices it has."""
        await self._start_processes()
        if self._torch_devices is None and may_have_accelerators():
            chosen = {name: value for name, value in self._settings.env.items() if name == VISIBLE_DEVICES}
            self._torch_devices = await detect_devices(self._fork_servers.own, chosen)

    async def close(self) -> None:
        """End its workers and fork servers, and what prepares workers."""
        if self._incarnation:
            await self._end_processes()
        await self._builds.close()
        await self._datasets.close()

    def add_slots(self, *, workers: int) -> None:
        """Add slots for ``workers``, and post a hello with them, unless there are enough already."""
        if SLOTS_PER_WORKER * workers > self._num_slots:
            self._num_slots = SLOTS_PER_WORKER * workers
            self._post_hello()

    def _post_hello(self) -> None:
        self._devices = host_devices(self._torch_devices or TorchDevices(), slots=self._num_slots)
        self._observer.post(
            HostHello(
                host=NAME,
                incarnation=self._incarnation,
                address="127.0.0.1",
                slots=self._devices.slots,
                device_class=self._devices.device_class,
                version=VERSION,
            )
        )

    async def keep(self) -> None:
        """Restart the fork server whenever it ends. Raises ResileError if several in a row cannot load."""
        num_unloaded = 0
        while True:
            try:
                await self._fork_servers.own.loaded()
                num_unloaded = 0
            except ResileError:
                num_unloaded += 1
                if self._incarnation == 1 or num_unloaded == MAX_UNLOADED:
                    raise
            ended = asyncio.ensure_future(self._fork_servers.own.ended())
            try:
                await asyncio.wait({ended, self._runner.fault}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
            if self._runner.fault.done():
                self._runner.fault.result()
            await self._end_processes()  # first: the exits of its workers say that they were orphaned
            self._observer.post(HostFailed(NAME, "the process that starts workers was killed"))
            await self._start_processes()
            self._post_hello()

    async def _start_processes(self) -> None:
        """Start a fork server, and be the next incarnation."""
        log = self._folder.logs / "fork-server.log"
        own = await ForkServerClient.start(log=log, settings=self._fork_server_settings)
        self._fork_servers = ForkServers(own, self._fork_server_settings, logs=self._folder.logs)
        self._incarnation += 1
        incarnation = _Incarnation(self._incarnation, self._observer)
        self._templates = HostTemplates(self._fork_servers, incarnation.post)
        self._runner = WorkerRunner(self._fork_servers, incarnation)

    async def _end_processes(self) -> None:
        await asyncio.gather(self._fork_servers.own.close(), self._fork_servers.close())
        await self._runner.wait_closed()

    def tick(self) -> None:
        """Send its agent a tick."""
        self._observer.post(HostEvent(NAME, self._incarnation, agent.Tick(is_bus_up=True)))

    async def carry_out(self, command: HostCommand) -> None:
        """Carry out a command of its agent; one of an earlier incarnation has no effect."""
        if command.incarnation != self._incarnation:
            return
        match command.command:
            case agent.StartWorker(job, worker) as start:
                self._runner.start(job, worker, self._prepare(start), log_folder=self._folder.logs)
            case agent.SendToWorker(job, worker, message):
                self._runner.send(job, worker, message)
            case agent.KillWorker(job, worker):
                self._runner.kill(job, worker)
            case agent.ForkWorker() | agent.PrepareTemplate() | agent.EndTemplate() as of_template:
                await self._templates.carry_out(of_template)

    async def _prepare(self, start: agent.StartWorker) -> WorkerConfig:
        job = self._job
        on_line = partial(self._observer.print_line, start.worker, "stderr")
        data = await self._datasets.get(start.job, start.worker, job.data, storage=job.storage, on_line=on_line)
        environment = await self._environments.get(job.storage, job.requirements, on_line)
        config = WorkerConfig(
            job=start.job,
            worker=start.worker,
            script=job.script,
            args=job.args,
            code=job.code,
            env={
                **self._kernels,
                **self._output,
                **data,
                **self._settings.env,
                **self._devices.environment(self._devices.slots[start.slot]),
            },
            directory=str(Path.cwd()),
            storage=job.storage,
            batches=job.batches,
            environment=environment.folder,
            packages=environment.packages,
            detection_seconds=self._settings.detection_seconds,
        )
        imports = Imports(
            start.job, config.script, config.script, config.directory, config.environment, self._settings.env, job.code
        )
        return await self._templates.choose(config, imports)


@dataclass(frozen=True)
class _Incarnation:
    """Observes the workers of one fork server; see `WorkerObserver`."""

    number: int
    observer: HostObserver

    def post(self, event: agent.Event) -> None:
        self.observer.post(HostEvent(NAME, self.number, event))

    def on_message(self, job: str, message: FromWorker) -> None:
        self.post(agent.MessageReceived(job, message))

    def on_line(self, job: str, worker: int, stream: Stream, line: str) -> None:
        self.observer.print_line(worker, stream, line)

    def on_log_error(self, job: str, worker: int, error: OSError) -> None:
        self.observer.note(Noted(f"what worker {worker} prints is not kept any more: {error.strerror}"))

    async def on_exit(self, job: str, worker: int, exit_: WorkerExit) -> None:
        self.post(agent.WorkerExited(job, worker, exit_))
