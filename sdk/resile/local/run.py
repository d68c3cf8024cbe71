"""The asyncio shell of a local run: the host, the journal, and the clock around an `InMemoryPool`."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from resile_learner.agent.host_devices import TorchDevices
from resile_learner.processes.client import ForkServerSettings
from resile_learner.processes.worker_process import Stream
from resile_scheduler.core import events as scheduler
from resile_scheduler.core.core import Scheduler
from resile_scheduler.policies.plan import PlanPolicy, PlanStep
from resile_shared.clock import SteadyClock
from resile_shared.errors import ResileError, UsageError
from resile_shared.log_files import truncate_logs
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import JobPause, JobResume, JobStop, Refused
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobState
from resile_shared.messages.reports import Completed, Report, Warned

from .events import Noted, Printed, RunEvent, RunOpened
from .host import HostObserver, LocalHost
from .in_memory import Command, Event, HostCommand, InMemoryPool, StartTimer
from .job import LocalJob
from .narrator import Narrator
from .output import LowestRankOutput
from .plan import parse_plan
from .result import Outcome, Result
from .runs import Home, RunFolder
from .settings import RunSettings
from .storage import fetch_model, has_checkpoint, try_storage

SUBMIT, PAUSE, STOP = "submit", "pause", "stop"
TICK_SECONDS = 1.0
SCRIPT_SECONDS = 5.0
"""Seconds that a stop waits for the script if training is complete meanwhile: there is nothing to save."""
STORAGE_SECONDS = 60.0
"""Seconds that a stop waits for its checkpoint once a worker warns, as it does if the storage does not accept it."""
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
        self._devices = devices
        self._fork_server = fork_server or ForkServerSettings()
        self._policy = settings.policy
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._record: JobRecord | None = None
        self._is_stopping = False
        self._journal_fault = ""
        self._folder: RunFolder
        self._job: LocalJob
        self._host: LocalHost
        self._narrator: Narrator
        self._history: list[HistoryItem]
        self._on_event: OnEvent

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
            stack.callback(self._folder.close)
            self._job = await asyncio.to_thread(LocalJob.of, self._settings, self._folder)
            if self._settings.storage:
                await asyncio.to_thread(try_storage, self._job.storage)
            job = self._job
            self._folder.note_start(
                Path(job.script),
                job.args,
                job.name,
                job.storage,
                time.time(),
                batches=job.batches,
                changed=job.code.changed,
            )
            pruning = asyncio.create_task(self._prune(home))
            try:
                await self._train(home)
            finally:
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
        self._host.add_slots(workers=workers)
        self._post(scheduler.PolicyChanged(policy, policy.reason))

    def stop(self) -> None:
        """End the run once a checkpoint is saved, however long an iteration takes, or at once if called again."""
        if self._is_stopping:
            self._stop_now()
            return
        self._is_stopping = True
        self._post(scheduler.JobChangeRequested(PAUSE, JobPause(job_id=self._job.id)))

    def _limit_stop(self, content: object) -> None:
        """Stop after a while, if ``content`` of a report says that a checkpoint may not come."""
        match content:
            case Completed():
                asyncio.get_running_loop().call_later(SCRIPT_SECONDS, self._stop_now)
            case Warned():
                asyncio.get_running_loop().call_later(STORAGE_SECONDS, self._stop_now)

    def _stop_now(self) -> None:
        self._post(scheduler.JobChangeRequested(STOP, JobStop(job_id=self._job.id)))

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the living workers, by worker id."""
        return self._host.pids

    def _open(self, home: Home) -> RunFolder:
        settings = self._settings
        if settings.resume:
            folder = home.resume(settings.script.absolute(), settings.resume.run)
        else:
            folder = home.create(settings.name or settings.script.stem)
        self._narrator = Narrator(self._policy.steps)
        self._output = LowestRankOutput()
        self._history = list(folder.journal.history)
        return folder

    async def _prune(self, home: Home) -> None:
        try:
            await asyncio.to_thread(home.prune)
        except OSError as error:
            self._on_event(Noted(f"an old run is not deleted: {error}; delete it by hand"))

    # the pool

    async def _train(self, home: Home) -> None:
        """Serve the pool until the job has ended."""
        self._host = LocalHost(
            self._job,
            self._folder,
            home,
            self._settings,
            HostObserver(self._post, self._print, self._on_event),
            fork_server=self._fork_server,
            devices=self._devices,
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._host.start()
            self._submit()
            if self._host.warning:
                self._on_event(Noted(self._host.warning))
            limiting = truncate_logs(self._folder.logs, names="fork-server*.log")  # workers' logs have their own limit
            parts = (self._decide(), self._tick(), self._host.keep(), limiting)
            tasks += [asyncio.create_task(part) for part in parts]
            self._on_event(RunOpened(self._job.id, str(self._folder.path), self._settings.resume is not None))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _uncancelled(self._close(tasks))

    async def _close(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._host.close()

    def _submit(self) -> None:
        """Submit the job; or restore it as it was stored, paused, and resume it."""
        job, journal = self._job, self._folder.journal
        request: Event = scheduler.JobSubmitted(SUBMIT, job.spec(self._policy), job=job.id)
        if journal.record is not None:
            generation = max(1, journal.generation)
            newest = Allocation(job=job.id, epoch=1, generation=generation, placements=(), secret="")
            self._post(scheduler.StateRestored((job.paused(journal.record, self._policy),), (newest,)))
            request = scheduler.JobChangeRequested(SUBMIT, JobResume(job_id=job.id))
        self._host.add_slots(workers=max(step.workers for step in self._policy.steps))
        self._post(request)

    async def _decide(self) -> None:
        """Handle events until the job has ended."""
        pool = InMemoryPool(
            Scheduler(
                secret=secrets.token_hex(32),
                policy=self._policy,
                detection_seconds=self._settings.detection_seconds,
            )
        )
        clock = SteadyClock()
        while not (self._record and self._record.state.is_final):
            event = await self._events.get()
            for command in pool.handle(event, now=clock.now()):
                await self._carry_out(command)
            self._show_journal_fault()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._host.tick()
            self._post(scheduler.Tick())

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    # commands

    async def _carry_out(self, command: Command) -> None:
        match command:
            case scheduler.StoreJob(record, items):
                self._store(record, items)
            case scheduler.WriteAllocation(allocation):
                self._folder.note_generation(allocation.generation)
            case Report():
                self._show(self._narrator.on_report(command))
                self._follow_leader()
                if self._is_stopping:
                    self._limit_stop(command.content)
            case HostCommand():
                await self._host.carry_out(command)
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

    # what the user sees

    def _print(self, worker: int, stream: Stream, line: str) -> None:
        """Show a line; what workers write to stderr during a stop goes to the log alone."""
        if stream == "stderr" and self._is_stopping:
            return
        self._follow_leader()
        if stream == "stdout" and self._output.printed(worker, line):
            return
        self._on_event(Printed(worker, stream, line, is_lowest_rank=worker == self._leader))

    def _follow_leader(self) -> None:
        """Show what the worker that is the lowest rank now has printed, and another one was lost before it had."""
        for line in self._output.follow(self._narrator.members or [self._leader]):
            self._on_event(Printed(self._leader, "stdout", line, is_lowest_rank=True))

    @property
    def _leader(self) -> int:
        """The worker whose output stands for all: the lowest rank, or before there are ranks the first one."""
        members = self._narrator.members
        return members[0] if members else self._host.first_worker

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
        model = None
        if record.completed and (key := record.completed.model):
            model = await asyncio.to_thread(fetch_model, self._job.storage, key, self._settings.output)
        return Result(
            record=record,
            history=tuple(self._history),
            name=self._job.name,
            outcome=self._outcome(record),
            min_workers=min(sizes),
            max_workers=max(sizes),
            seconds=seconds,
            progress=self._narrator.progress,
            model=model,
            logs=str(self._folder.logs),
            output=self._output_folder(),
            can_resume=await self._can_resume(record),
        )

    def _output_folder(self) -> str | None:
        """Return the run's own folder of output, if workers have written to it."""
        folder = self._folder.output
        return str(folder) if folder.is_dir() and any(folder.iterdir()) else None

    async def _can_resume(self, record: JobRecord) -> bool:
        if record.checkpoint is not None or record.completed:
            return record.checkpoint is not None
        return await asyncio.to_thread(has_checkpoint, self._job.storage)

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


async def train_alone(
    script: Path, args: Sequence[str], *, home: Path, name: str, env: Mapping[str, str] | None = None
) -> Result:
    """Train on one worker, to the end: a run that is disturbed has to end with the same parameters.

    Raises ResileError if it does not complete.
    """
    settings = RunSettings(
        script=script, args=tuple(args), env=env or {}, plan=parse_plan("0:1"), home=home, name=name.replace(" ", "-")
    )
    result = await LocalRun(settings).run()
    if result.completed is None:
        raise ResileError(f"{name} alone {result.outcome.state}: {result.outcome.error}; logs: {result.logs}")
    return result
