"""The asyncio shell of a local run: the worker processes, the journal, and the clock around an `InMemoryPool`."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from resile_learner.agent import events as agent
from resile_learner.agent.datasets import JobDatasets
from resile_learner.agent.devices import (
    HostDevices,
    TorchDevices,
    detect_devices,
    host_devices,
    may_have_accelerators,
)
from resile_learner.agent.environments import JobEnvironments
from resile_learner.agent.host_templates import HostTemplates, Imports
from resile_learner.datasets import Datasets
from resile_learner.environments import Environments
from resile_learner.messages import FromWorker, WorkerConfig
from resile_learner.processes.client import ENVIRONMENT, ForkServerClient, ForkServerSettings
from resile_learner.processes.fork_servers import ForkServers
from resile_learner.processes.runner import WorkerRunner
from resile_learner.processes.worker_process import Stream
from resile_scheduler.core import events as scheduler
from resile_scheduler.core.core import Scheduler
from resile_scheduler.policies.plan import PlanPolicy, PlanStep
from resile_shared.clock import SteadyClock
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import JobPause, JobResume, JobStop, Refused
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.hosts import HostHello, WorkerExit
from resile_shared.messages.jobs import MAX_WORKERS, HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.reports import Report
from resile_shared.model_files import format_of, key_of

from .events import Noted, Printed, RunEvent, RunOpened
from .in_memory import Command, Event, HostCommand, HostEvent, HostFailed, InMemoryPool, StartTimer
from .narrator import Narrator
from .result import Outcome, Result
from .runs import Home, RunFolder
from .settings import RunSettings

HOST = "local"
PROBE = "probe"
SUBMIT, PAUSE, STOP = "submit", "pause", "stop"
MAX_UNLOADED = 3
"""Fork servers in a row that may end during their imports."""
TICK_SECONDS = 1.0
PAUSE_SECONDS = 5.0
"""How long a stop waits for the checkpoint of the pause before it."""
SLOTS_PER_WORKER = 2
"""So that a new worker need not wait for the process of an old one to end."""
OnEvent = Callable[[RunEvent], None]


class LocalRun:
    """One run. `run` it once; from its first event on, `resize` and `stop` may be called in the same event loop."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        fork_server: ForkServerSettings | None = None,
        devices: TorchDevices | None = None,
    ) -> None:
        """Make a run. ``devices`` are those of its workers; without them, what torch detects."""
        self._settings = settings
        self._torch_devices = devices
        self._policy = settings.policy
        self._fork_server_settings = fork_server or ForkServerSettings()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._record: JobRecord | None = None
        self._is_stopping = False
        self._incarnation = 0
        self._num_slots = 0
        self._journal_fault = ""
        self._devices: HostDevices
        self._folder: RunFolder
        self._environments: JobEnvironments
        self._datasets: JobDatasets
        self._data: tuple[Dataset, ...]
        self._requirements: tuple[str, ...]
        self._narrator: Narrator
        self._history: list[HistoryItem] = []
        self._on_event: OnEvent
        self._fork_servers: ForkServers
        self._runner: WorkerRunner
        self._templates: HostTemplates

    async def run(self, on_event: OnEvent = lambda event: None) -> Result:
        """Train to the end, calling ``on_event`` with all that happens; return how it ended.

        Whatever happens, no process of the run is left when this returns or raises. Raises ResileError when the run
        could not even be opened; how it fails later is in the result.
        """
        started = time.monotonic()
        self._on_event = on_event
        home = Home(self._settings.home)
        with ExitStack() as stack:
            self._folder = self._open(home)
            builds = Environments(home.environments, variables=os.environ)
            self._environments = JobEnvironments(builds)
            self._datasets = JobDatasets(Datasets(home.datasets, storage=""))
            stack.callback(self._folder.close)
            if self._settings.storage:
                await asyncio.to_thread(_try_storage, self._storage)
            script = self._settings.script.absolute()
            self._folder.note_start(script, self._args, self._name, self._storage, time.time(), batches=self._batches)
            pruning = asyncio.create_task(asyncio.to_thread(home.prune))
            try:
                await self._train()
            finally:
                await builds.close()
                await self._datasets.close()
                await asyncio.shield(pruning)
            return await self._result(time.monotonic() - started)

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, as soon as possible. Raises UsageError if it can never be."""
        if workers < 1:
            raise UsageError(f"a run needs at least 1 worker, not {workers}")
        ready = self._record.ready if self._record else None
        policy = PlanPolicy((PlanStep(0, workers),), fits_shards=ready is None, reason=f"resize to {workers}")
        if ready and (error := policy.error(num_shards=ready.num_shards, batch_size=ready.batch_size)):
            raise UsageError(error)
        self._policy = policy
        if SLOTS_PER_WORKER * workers > self._num_slots:
            self._post(self._hello())
        self._post(scheduler.PolicyChanged(policy, policy.reason))

    def stop(self) -> None:
        """End the run once a checkpoint is saved, or at once if that takes long or this is called again."""
        if self._is_stopping:
            self._stop_now()
            return
        self._is_stopping = True
        self._post(scheduler.JobChangeRequested(PAUSE, JobPause(job_id=self._folder.job)))
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._stop_now)

    def _stop_now(self) -> None:
        self._post(scheduler.JobChangeRequested(STOP, JobStop(job_id=self._folder.job)))

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the living workers, by worker id."""
        return {worker: pid for (_, worker), pid in self._runner.pids.items()}

    def _open(self, home: Home) -> RunFolder:
        settings = self._settings
        script = settings.script.absolute()
        if settings.resume:
            folder = home.resume(script, settings.resume.run)
        else:
            folder = home.create(settings.name or script.stem)
        self._args = settings.args or folder.journal.args
        stored = folder.journal.record
        self._requirements = settings.requirements or (stored.spec.requirements if stored else ())
        self._data = settings.data or (stored.spec.data if stored else ())
        self._batches = settings.batches or folder.journal.batches
        self._name = settings.name or folder.journal.name or script.stem
        self._storage = folder.journal.storage or folder.path.as_uri()
        if settings.storage:
            self._storage = f"{settings.storage.rstrip('/')}/{folder.job}"
        self._narrator = Narrator(self._policy.steps)
        self._history = list(folder.journal.history)
        return folder

    # the pool

    def _first_events(self) -> Iterable[Event]:
        """Submit the job; or restore it as it was stored, paused, and resume it."""
        sizes = [step.workers for step in self._policy.steps]
        spec = JobSpec(
            name=self._name[:200],
            package=str(Path.cwd()),
            script=str(self._settings.script.absolute()),
            args=self._args,
            requirements=self._requirements,
            data=self._data,
            min_workers=1 if self._policy.fits_shards else min(sizes),
            max_workers=MAX_WORKERS if self._policy.fits_shards else max(sizes),
        )
        job, stored = self._folder.job, self._folder.journal.record
        if stored is None:
            return [self._hello(), scheduler.JobSubmitted(SUBMIT, spec, job=job)]
        record = JobRecord(
            job=job,
            spec=spec,
            state=JobState.PAUSED,
            priority=stored.priority,
            submitted=stored.submitted,
            generation=stored.generation,
            lineage=max(1, stored.lineage),  # a run that is resumed always looks for a checkpoint
            next_worker=stored.next_worker,
            num_items=stored.num_items,
            kind=stored.kind,
            reason=stored.reason,
            iteration=stored.iteration,
            allocation=stored.allocation,
            warnings=stored.warnings,
            checkpoint=stored.checkpoint,
        )
        generation = max(1, self._folder.journal.generation)
        newest = Allocation(job=job, epoch=1, generation=generation, placements=(), secret="")
        resume = scheduler.JobChangeRequested(SUBMIT, JobResume(job_id=job))
        return [scheduler.StateRestored((record,), (newest,)), self._hello(), resume]

    def _hello(self) -> HostHello:
        self._num_slots = max(self._num_slots, SLOTS_PER_WORKER * max(step.workers for step in self._policy.steps))
        self._devices = host_devices(self._torch_devices or TorchDevices(), slots=self._num_slots)
        return HostHello(
            host=HOST,
            incarnation=self._incarnation,
            address="127.0.0.1",
            slots=self._devices.slots,
            device_class=self._devices.device_class,
        )

    async def _train(self) -> None:
        """Serve the pool until the job has ended."""
        core = Scheduler(
            secret=secrets.token_hex(32),
            policy=self._policy,
            detection_seconds=self._settings.detection_seconds,
        )
        await self._start_host()
        try:
            await self._detect_devices()
        except BaseException:
            await _uncancelled(self._close_host())
            raise
        for event in self._first_events():
            self._post(event)
        if self._devices.warning:
            self._on_event(Noted(self._devices.warning))
        work = (self._decide(InMemoryPool(core)), self._tick(), self._keep_host())
        tasks = [asyncio.create_task(part) for part in work]
        try:
            self._on_event(RunOpened(self._folder.job, str(self._folder.path), self._settings.resume is not None))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _uncancelled(self._close(tasks))

    async def _detect_devices(self) -> None:
        if self._torch_devices is None and may_have_accelerators():
            self._torch_devices = await detect_devices({**os.environ, **ENVIRONMENT, **self._settings.env})

    async def _close(self, tasks: Iterable["asyncio.Task[None]"]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._close_host()

    # the host

    async def _start_host(self) -> None:
        """Start a fork server, and be the next incarnation of the only host of the pool."""
        settings = replace(
            self._fork_server_settings,
            storage=_local_folder(self._storage),
            inherit=(*self._fork_server_settings.inherit, self._folder.lock),
        )
        log = self._folder.logs / "fork-server.log"
        own = await ForkServerClient.start(log=log, settings=settings)
        self._fork_servers = ForkServers(own, settings, logs=self._folder.logs)
        self._incarnation += 1
        self._templates = HostTemplates(self._fork_servers, partial(self._post_from_host, self._incarnation))
        self._runner = WorkerRunner(
            self._fork_servers, _Incarnation(self._incarnation, self._post, self._print, self._on_event)
        )

    async def _close_host(self) -> None:
        await asyncio.gather(self._fork_servers.own.close(), self._fork_servers.close())
        await self._runner.wait_closed()

    async def _keep_host(self) -> None:
        """Start the host again whenever its fork server ends. Raises ResileError if several in a row cannot load."""
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
            await self._close_host()  # first: the exits of its workers say that they were orphaned
            self._post(HostFailed(HOST, "the process that starts workers was killed"))
            await self._start_host()
            self._post(self._hello())

    async def _decide(self, pool: InMemoryPool) -> None:
        """Handle events until the job has ended."""
        clock = SteadyClock()
        while not (self._record and self._record.state.is_final):
            event = await self._events.get()
            for command in pool.handle(event, now=clock.now()):
                await self._carry_out(command)
            self._show_journal_fault()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._post(HostEvent(HOST, self._incarnation, agent.Tick(is_bus_up=True)))
            self._post(scheduler.Tick())

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    def _post_from_host(self, incarnation: int, event: agent.Event) -> None:
        self._post(HostEvent(HOST, incarnation, event))

    # commands

    async def _carry_out(self, command: Command) -> None:
        match command:
            case scheduler.StoreJob(record, items):
                self._store(record, items)
            case scheduler.WriteAllocation(allocation):
                self._folder.note_generation(allocation.generation)
            case Report():
                self._show(self._narrator.on_report(command))
            case HostCommand(_, incarnation, what):
                if incarnation == self._incarnation:
                    await self._command_host(what)
            case StartTimer(seconds, event):
                asyncio.get_running_loop().call_later(seconds, self._post, event)
            case scheduler.Reply(request, Refused()) if request == PAUSE:
                self._stop_now()  # training is complete: there is nothing to save
            case scheduler.Reply():
                pass

    def _store(self, record: JobRecord, items: Sequence[HistoryItem]) -> None:
        self._record = record
        self._history += items
        self._folder.note_record(record, items)
        self._show(self._narrator.on_record(record, items))
        if self._is_stopping and record.state is JobState.PAUSED:
            self._stop_now()

    async def _command_host(self, command: agent.HostCommand) -> None:
        match command:
            case agent.StartWorker(job, worker):
                self._runner.start(job, worker, self._prepare(command), log_folder=self._folder.logs)
            case agent.SendToWorker(job, worker, message):
                self._runner.send(job, worker, message)
            case agent.KillWorker(job, worker):
                self._runner.kill(job, worker)
            case agent.ForkWorker() | agent.PrepareTemplate() | agent.EndTemplate():
                await self._templates.carry_out(command)

    async def _prepare(self, start: agent.StartWorker) -> WorkerConfig:
        on_line = partial(self._print, start.worker, "stderr")
        data = await self._datasets.get(start.job, start.worker, self._data, storage=self._storage, on_line=on_line)
        environment = await self._environments.get(self._storage, self._requirements, on_line)
        config = WorkerConfig(
            job=start.job,
            worker=start.worker,
            script=str(self._settings.script.absolute()),
            args=self._args,
            env={**data, **self._settings.env, **self._devices.environment(self._devices.slots[start.slot])},
            directory=str(Path.cwd()),
            storage=self._storage,
            batches=self._batches,
            environment=environment.folder,
            packages=environment.packages,
            detection_seconds=self._settings.detection_seconds,
        )
        imports = Imports(
            start.job, config.script, config.script, config.directory, config.environment, self._settings.env
        )
        return await self._templates.choose(config, imports)

    def _print(self, worker: int, stream: Stream, line: str) -> None:
        """Show a line; what workers complain of while they are killed is for the log alone."""
        if not (self._is_stopping and stream == "stderr"):
            self._on_event(Printed(worker, stream, line, is_lowest_rank=worker == self._leader))

    @property
    def _leader(self) -> int:
        """The worker whose output stands for all: the lowest rank, or before there are ranks the first one."""
        return self._narrator.lowest_rank if self._narrator.lowest_rank is not None else min(self.pids, default=0)

    # what the user sees

    def _show(self, events: Iterable[RunEvent]) -> None:
        for event in events:
            self._on_event(event)

    def _show_journal_fault(self) -> None:
        """Note once that the run's folder cannot be written: the run goes on."""
        fault, before = self._folder.journal_fault, self._journal_fault
        self._journal_fault = fault
        if fault and not before:
            advice = "free some space, or a run that resumes will not know what happens now"
            self._on_event(Noted(f"{self._folder.path} cannot be written: {fault}; {advice}"))

    # the result

    async def _result(self, seconds: float) -> Result:
        record = self._record
        assert record is not None
        sizes = [step.workers for step in self._settings.policy.steps]
        model = record.completed.model if record.completed else None
        return Result(
            record=record,
            history=tuple(self._history),
            name=self._name,
            outcome=self._outcome(record),
            min_workers=min(sizes),
            max_workers=max(sizes),
            seconds=seconds,
            progress=self._narrator.progress,
            model=await self._fetch_model(model) if model else None,
            logs=str(self._folder.logs),
        )

    def _outcome(self, record: JobRecord) -> Outcome:
        match record.state:
            case JobState.COMPLETED:
                return Outcome("completed")
            case JobState.STOPPED:
                return Outcome("stopped")
            case _:
                ready, error = record.ready, record.reason
                usage = ready and self._policy.error(
                    num_shards=ready.num_shards,
                    batch_size=ready.batch_size,
                    iterations_total=ready.iterations_total,
                )
                return Outcome("failed", error, self._narrator.traceback_of(error), is_usage_error=error == usage)

    async def _fetch_model(self, key: str) -> str:
        output = self._settings.output
        if output is not None:
            from resile_shared.storage import ObjectStorage  # only now: it loads the clients of all clouds

            await asyncio.to_thread(
                ObjectStorage(self._storage).download, key_of(key, format_of(output)), output.absolute()
            )
            return str(output)
        folder = _local_folder(self._storage)
        return str(folder / key) if folder else f"{self._storage.rstrip('/')}/{key}"


@dataclass(frozen=True)
class _Incarnation:
    """Observes the workers of one fork server; see `WorkerObserver`."""

    number: int
    post: Callable[[Event], None]
    print_line: Callable[[int, Stream, str], None]
    show: OnEvent

    def on_message(self, job: str, message: FromWorker) -> None:
        self.post(HostEvent(HOST, self.number, agent.MessageReceived(job, message)))

    def on_line(self, job: str, worker: int, stream: Stream, line: str) -> None:
        self.print_line(worker, stream, line)

    def on_log_error(self, job: str, worker: int, error: OSError) -> None:
        self.show(Noted(f"what worker {worker} prints is not kept any more: {error.strerror}"))

    async def on_exit(self, job: str, worker: int, exit_: WorkerExit) -> None:
        self.post(HostEvent(HOST, self.number, agent.WorkerExited(job, worker, exit_)))


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` to its end, also when this task is cancelled meanwhile: processes would be left behind."""
    ending = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    ending.result()
    if cancelled is not None:
        raise cancelled


def _try_storage(url: str) -> None:
    """Find out now, and not at the first checkpoint, what is wrong with storage that the user named."""
    from resile_shared.storage import ObjectStorage

    storage = ObjectStorage(url)
    storage.put(PROBE, [b"resile"])
    storage.delete([PROBE])


def _local_folder(storage: str) -> Path | None:
    """Return the path behind a file:// URL, None for any other."""
    parts = urlsplit(storage)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
