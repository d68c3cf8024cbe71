"""Records everything that the pool reports while it is attacked, for the verdict."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from resile_shared.errors import ResileError
from resile_shared.http.api import EventView
from resile_shared.messages.jobs import JobEvent
from resile_shared.messages.reports import CheckpointSaved, Completed, Progress, Report, Switched

from ..client import AsyncClient
from .members import Saved

_EVER = 10_000


@dataclass(frozen=True)
class Commit:
    """A generation was seen to have committed ``iteration`` iterations, at ``time`` (seconds since the epoch)."""

    time: float
    generation: int
    iteration: int
    loss: float | None
    samples_seen: int


@dataclass
class Observations:
    """Everything reported so far."""

    events: list[JobEvent] = field(default_factory=list)
    """The events of all jobs, in the order of the stream."""
    commits: defaultdict[str, list[Commit]] = field(default_factory=lambda: defaultdict(list))
    members: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    """The workers of each generation that took effect, by job and generation."""
    checkpoints: defaultdict[str, list[Saved]] = field(default_factory=lambda: defaultdict(list))
    """The complete checkpoints of each job."""
    completed: dict[str, float] = field(default_factory=dict)
    """When each job completed, in seconds since the epoch."""
    stopped: dict[str, float] = field(default_factory=dict)
    """When each job was stopped, in seconds since the epoch."""
    sequences: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The sequences of all messages that were read, by reader: ``pool``, or a stream of a job."""

    def add_event(self, view: EventView) -> None:
        """Add one event of the pool."""
        self.sequences["pool"].append(view.sequence)
        if view.subject.startswith("resile.job."):
            event = JobEvent.model_validate(view.data)
            self.events.append(event)
            if event.item.kind == "stopped":
                self.stopped[event.job] = event.item.time.timestamp()

    def over(self, job: str) -> list[float]:
        """Return when ``job`` completed or was stopped; empty before.

        The verdict condemns a job that was stopped by nobody.
        """
        return [ends[job] for ends in (self.completed, self.stopped) if job in ends]

    def add_report(self, view: EventView) -> None:
        """Add one report of a job; its events come with those of the pool."""
        if view.stream == "events":
            return
        report = Report.model_validate(view.data)
        job, when = report.job, report.time.timestamp()
        self.sequences[f"{view.stream} of {job}"].append(view.sequence)
        match report.content:
            case Progress() as progress:
                commit = Commit(when, report.generation, progress.iteration, progress.loss, progress.samples_seen)
                self.commits[job].append(commit)
            case Switched(workers=workers):
                self.members[job, report.generation] = frozenset(workers)
            case CheckpointSaved(iteration=iteration):
                self.checkpoints[job].append(Saved(view.time.timestamp(), iteration))
            case Completed():
                self.completed[job] = when


class Observer:
    """Reads the events and reports of the pool."""

    def __init__(self, client: AsyncClient) -> None:
        self.seen = Observations()
        self.fault = ""
        """Why reading failed; empty: it did not."""
        self._client = client
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, client: AsyncClient) -> "AsyncIterator[Observer]":
        """Observe the pool while the block runs."""
        observer = cls(client)
        observer._start("pool", observer._read_pool)
        try:
            yield observer
        finally:
            for task in observer._tasks.values():
                task.cancel()
            await asyncio.wait(observer._tasks.values())

    def follow(self, job: str) -> None:
        """Read all reports of the workers of ``job``, too."""
        if job not in self._tasks:
            self._start(job, lambda: self._read_job(job))

    def _start(self, name: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks[name] = asyncio.create_task(self._catch_errors(name, read))

    async def _catch_errors(self, name: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await read()
        except ResileError as error:
            self.fault = f"the events of {name} could not be read completely: {error}"

    async def _read_pool(self) -> None:
        async for view in self._client.follow_events(tail=_EVER):
            self.seen.add_event(view)

    async def _read_job(self, job: str) -> None:
        async for view in self._client.follow_events(job=job, tail=_EVER):
            self.seen.add_report(view)
