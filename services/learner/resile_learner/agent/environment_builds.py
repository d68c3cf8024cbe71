"""Builds the environments of jobs before their workers are placed: one at a time, in the requested order."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from resile_shared.errors import ResileError
from resile_shared.messages.hosts import EnvironmentReport

from ..preparation import PreparationFailed
from ..processes.worker_process import Stream
from .host_workers import WorkerContext

logger = logging.getLogger(__name__)


class OnLineOfJob(Protocol):
    """Is called with each line that a build prints; ``worker`` is None, since the line belongs to no worker."""

    def __call__(self, job: str, worker: int | None, stream: Stream, line: str) -> None:
        """Handle a line."""


class EnvironmentBuilds:
    """The environments that one incarnation of an agent is asked for. None is removed as long as it is asked for."""

    def __init__(
        self, context: WorkerContext, *, on_line: OnLineOfJob, post: Callable[[EnvironmentReport], None]
    ) -> None:
        self._context = context
        self._on_line = on_line
        self._post = post
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The tasks that prepare environments, by job, in the requested order."""
        self._held: dict[str, ExitStack] = {}
        self.waiting: dict[str, asyncio.Event] = {}
        """The jobs whose builds wait for their turn, and what starts each."""
        self._undecided: set[str] = set()
        """Jobs that may have to build: until that is known, no job behind them gets a turn."""
        self._building = ""

    def prepare(self, jobs: tuple[str, ...]) -> None:
        """Build the environments of ``jobs`` that are missing, and end all other builds; post a report of each step."""
        for job in self._tasks.keys() - set(jobs):
            self._tasks.pop(job).cancel()
            self._release(job)
        self._tasks = {job: self._tasks.get(job) or asyncio.create_task(self._prepare(job)) for job in jobs}

    async def close(self) -> None:
        """End the builds that run."""
        tasks = list(self._tasks.values())
        self.prepare(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self, job: str) -> None:
        try:
            await self._build(job)
        except (ResileError, OSError) as error:
            is_hosts_fault = not isinstance(error, PreparationFailed) or error.is_hosts_fault
            self._fail(job, " ".join(str(error).split()), is_hosts_fault=is_hosts_fault)
        except Exception as error:  # a bug, or what is stored is damaged: the job must not wait for this host for ever
            logger.exception("preparing environment failed job=%s", job)
            self._fail(job, f"the environment cannot be prepared: {error!r}", is_hosts_fault=True)

    def _fail(self, job: str, reason: str, *, is_hosts_fault: bool) -> None:
        self._post(EnvironmentReport(job=job, state="failed", reason=reason, is_hosts_fault=is_hosts_fault))

    async def _build(self, job: str) -> None:
        self._undecided.add(job)
        environments = self._context.environments
        try:
            entry = await self._context.jobs.get(job)
            if entry is None:
                raise ResileError(f"no record of job {job} is stored")
            requirements, storage = entry.value.spec.requirements, self._context.storage_of(job)
            on_line = partial(self._on_line, job, None, "stderr")
            is_there = await environments.has(storage, requirements)
            if not is_there:
                await self._wait_for_turn(job)
        finally:
            self._undecided.discard(job)
            self._give_turn()
        try:
            if not is_there:
                self._post(EnvironmentReport(job=job, state="building"))
            environment = await environments.get(storage, requirements, on_line)
        finally:
            self._end_turn(job)
        held = self._held[job] = ExitStack()
        held.enter_context(environments.hold(environment))
        self._post(EnvironmentReport(job=job, state="ready"))

    async def _wait_for_turn(self, job: str) -> None:
        turn = self.waiting[job] = asyncio.Event()
        self._undecided.discard(job)
        self._give_turn()
        try:
            await turn.wait()
        except asyncio.CancelledError:
            self._end_turn(job)
            raise
        finally:
            self.waiting.pop(job, None)

    def _end_turn(self, job: str) -> None:
        if self._building == job:
            self._building = ""
            self._give_turn()

    def _give_turn(self) -> None:
        """Let the first waiting job build, if no build is running."""
        first = next((job for job in self._tasks if job in self.waiting or job in self._undecided), "")
        if first in self.waiting and not self._building:
            self._building = first
            self.waiting.pop(first).set()

    def _release(self, job: str) -> None:
        if held := self._held.pop(job, None):
            held.close()
