"""The asyncio shell of a local run: it starts, hears and kills processes as the director decides."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..messages import WorkerConfig
from ..processes.client import ForkServerClient, ForkServerSettings
from ..processes.worker_log import WorkerLog, worker_log
from ..processes.worker_process import MalformedMessageError, Stream, WorkerProcess
from .core import Director
from .events import Noted, Opened, Printed, Recorded, RunEvent, Saved
from .result import Result
from .runs import Home, RunFolder
from .seam import (
    Begin,
    Command,
    DeadlinePassed,
    End,
    Event,
    Exited,
    Fork,
    Garbled,
    Kill,
    ResizeAsked,
    Said,
    Send,
    Show,
    StopAsked,
    StopBy,
)
from .settings import RunSettings

PROBE = "probe"
OnEvent = Callable[[RunEvent], None]


class LocalRun:
    """One run. `run` it once; from its first event on, `resize` and `stop` may be called in the same event loop."""

    def __init__(self, settings: RunSettings, *, fork_server: ForkServerSettings | None = None) -> None:
        self._settings = settings
        self._fork_server_settings = fork_server or ForkServerSettings()
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._processes: dict[int, WorkerProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder: RunFolder
        self._director: Director
        self._stopping = False
        self._fork_server: ForkServerClient
        self._on_event: OnEvent
        self._ordered = 0
        self._has_told_fault = False
        self._end: End | None = None

    async def run(self, on_event: OnEvent = lambda event: None) -> Result:
        """Train to the end, telling ``on_event`` all that happens; return how it went.

        Whatever happens, no process of the run is left when this returns or raises. Raises ResileError when the run
        could not even be opened; how it fails later is told in the result.
        """
        started = time.monotonic()
        self._on_event = on_event
        home = Home(self._settings.home)
        with ExitStack() as stack:
            self._folder = self._open(home)
            stack.callback(self._folder.close)
            if self._settings.storage:
                await asyncio.to_thread(_try_storage, self._storage)
            pruning = asyncio.create_task(asyncio.to_thread(home.prune))
            try:
                await self._train()
            finally:
                await asyncio.shield(pruning)
            return await self._result(time.monotonic() - started)

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, as soon as possible. Raises UsageError if there can never be so many."""
        self._director.check_resize(workers)
        self._post(ResizeAsked(workers))

    def stop(self) -> None:
        """End the run, keeping what can be resumed. Called again: at once."""
        self._stopping = True
        self._post(StopAsked())

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the living workers, by worker id."""
        return {worker: process.pid for worker, process in self._processes.items() if process.pid is not None}

    def _open(self, home: Home) -> RunFolder:
        settings = self._settings
        script = settings.script.absolute()
        if settings.resume:
            folder = home.resume(script, settings.resume.run)
        else:
            folder = home.create(settings.name or script.stem)
        self._args = settings.args or folder.journal.args
        self._name = settings.name or folder.journal.name or script.stem
        self._storage = folder.journal.storage or folder.path.as_uri()
        if settings.storage:
            self._storage = f"{settings.storage.rstrip('/')}/{folder.job}"
        folder.note_start(script, self._args, self._name, self._storage, time.time())
        self._director = Director(
            folder.job,
            settings.steps,
            secret=secrets.token_hex(32),
            is_default=settings.is_default_size,
            origin=folder.journal.origin,
        )
        return folder

    # the shell

    async def _train(self) -> None:
        folder = self._folder
        fork_server = ForkServerSettings(
            entry=self._fork_server_settings.entry,
            preload=self._fork_server_settings.preload,
            storage=_local_folder(self._storage),
            inherit=(*self._fork_server_settings.inherit, folder.lock),
        )
        self._fork_server = await ForkServerClient.start(log=folder.logs / "fork-server.log", settings=fork_server)
        try:
            self._on_event(Opened(folder.job, str(folder.path), resumed=self._settings.resume is not None))
            self._post(Begin())
            while self._end is None:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                for command in self._director.handle(event, now=time.time()):
                    await self._carry_out(command)
                self._tell_journal_fault()
        finally:
            await self._kill_everything()

    def _tell_journal_fault(self) -> None:
        """Say once that the run's folder cannot be written: the run goes on."""
        fault = self._folder.journal_fault
        if fault and not self._has_told_fault:
            advice = "make room there, or what happens now is not known to a run that resumes"
            self._on_event(Noted(f"{self._folder.path} cannot be written: {fault}; {advice}"))
        self._has_told_fault = bool(fault)

    async def _kill_everything(self) -> None:
        """Go on to the end even if this task is cancelled meanwhile: what is alive would stay."""
        closing = asyncio.ensure_future(self._close())
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def _close(self) -> None:
        await self._fork_server.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def _carry_out(self, command: Command) -> None:
        match command:
            case Fork(worker):
                self._folder.note_worker(worker)
                await self._fork(worker)
            case Send(worker, message):
                if message.kind == "order" and message.generation > self._ordered:
                    self._ordered = message.generation
                    self._folder.note_order(message.generation)
                if worker in self._processes:
                    self._processes[worker].send(message)
            case Kill(worker):
                if worker in self._processes:
                    self._processes[worker].kill()
            case Show(event):
                self._note(event)
                self._on_event(event)
            case StopBy(seconds):
                asyncio.get_running_loop().call_later(seconds, self._post, DeadlinePassed())
            case End():
                self._end = command

    def _note(self, event: RunEvent) -> None:
        match event:
            case Recorded(item):
                self._folder.note_history(item)
            case Saved(checkpoint):
                self._folder.note_checkpoint(checkpoint.iteration)
            case _:
                pass

    async def _fork(self, worker: int) -> None:
        config = WorkerConfig(
            job=self._folder.job,
            worker=worker,
            script=str(self._settings.script.absolute()),
            args=self._args,
            env=dict(self._settings.env),
            directory=str(Path.cwd()),
            storage=self._storage,
            resume=self._settings.resume is not None,
            detection_seconds=self._settings.detection_seconds,
        )
        with ExitStack() as stack:
            log = stack.enter_context(worker_log(self._folder.logs, worker))
            process = await self._fork_server.fork(
                config, lambda stream, line: self._printed(worker, log, stream, line)
            )
            task = asyncio.create_task(self._follow(process, stack.pop_all()))
        self._processes[worker] = process
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    async def _follow(self, process: WorkerProcess, resources: ExitStack) -> None:
        """Tell the director all that a worker says, and then how it ended."""
        with resources:
            try:
                async for message in process.messages():
                    self._post(Said(message))
            except MalformedMessageError as error:
                self._post(Garbled(str(error)))
                process.kill()
            exit_ = await process.wait()
        del self._processes[process.worker]
        self._post(Exited(process.worker, exit_))

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._events.put_nowait(error)

    def _printed(self, worker: int, log: WorkerLog, stream: Stream, line: str) -> None:
        try:
            log.write(line)
        except OSError as error:  # a full disk: training goes on
            self._on_event(Noted(f"what worker {worker} prints is not kept any more: {error.strerror}"))
        if not (self._stopping and stream == "stderr"):  # complaints of what is being killed are for the log alone
            self._on_event(Printed(worker, stream, line, leads=worker == self._director.leader))

    # the result

    async def _result(self, seconds: float) -> Result:
        director, settings = self._director, self._settings
        outcome = director.outcome
        assert outcome is not None
        sizes = [item.workers for item in director.history if item.kind == "allocation"] or [0]
        planned = [step.workers for step in settings.steps]
        model = None
        if director.completed and director.completed.model:
            model = await self._fetch_model(director.completed.model)
        return Result(
            job=self._folder.job,
            name=self._name,
            outcome=outcome,
            min_workers=min(planned),
            max_workers=max(planned),
            workers=sizes[-1],
            generation=director.in_force.generation if director.in_force else 0,
            seconds=seconds,
            ready=director.ready,
            progress=director.progress,
            checkpoint=director.checkpoint,
            completed=director.completed,
            history=(*self._folder.journal.history, *director.history),
            model=model,
            logs=str(self._folder.logs),
            can_resume=director.checkpoint is not None or self._folder.journal.has_checkpoint,
        )

    async def _fetch_model(self, key: str) -> str:
        output = self._settings.output
        if output is not None:
            from resile_shared.storage import ObjectStorage  # only now: it loads the clients of all clouds

            await asyncio.to_thread(ObjectStorage(self._storage).download, key, output.absolute())
            return str(output)
        folder = _local_folder(self._storage)
        return str(folder / key) if folder else f"{self._storage.rstrip('/')}/{key}"


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
