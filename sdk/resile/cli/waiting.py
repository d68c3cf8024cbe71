"""`resile wait`: shows jobs until they end; progress bars on a terminal, lines of text elsewhere."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from resile_shared.http.api import JobSummary
from resile_shared.text import printable

from ..client import AsyncClient
from ..http_requests import PATIENCE_SECONDS, Refused, Unreachable, is_outage
from .tables import clock, count, iterations, number

POLL_SECONDS = 0.5

T = TypeVar("T")
PLAIN_SECONDS = 5.0


Board = Callable[[Iterable[JobSummary]], None]
"""A function that shows jobs as they are now."""


async def poll(fetch: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
    """Yield the result of ``fetch`` twice a second. Raises its errors; an unreachable pool only after a minute."""
    last_success = time.monotonic()
    while True:
        try:
            result = await fetch()
        except (Unreachable, Refused) as error:
            if not is_outage(error) or time.monotonic() - last_success > PATIENCE_SECONDS:
                raise
        else:
            last_success = time.monotonic()
            yield result
        await asyncio.sleep(POLL_SECONDS)


async def wait(client: AsyncClient, names: list[str], *, quiet: bool) -> tuple[JobSummary, ...]:
    """Return the jobs once all of them are over, as they were last seen. Raises Refused if one is deleted before."""
    jobs: dict[str, JobSummary | None] = {await client.find(name, newest=True): None for name in names}

    async def look() -> list[JobSummary]:
        seen = {job.id: job for job in await client.jobs()}
        for id_, last in jobs.items():
            is_over = last is not None and last.state.is_final
            jobs[id_] = seen.get(id_) or (last if is_over else await client.job(id_))
        return [job for job in jobs.values() if job is not None]

    with _open_board(quiet=quiet) as show:
        async for known in poll(look):
            show(known)
            if all(job.state.is_final for job in known):
                return tuple(known)
    raise AssertionError("looks never end by themselves")


@contextmanager
def _open_board(*, quiet: bool) -> Iterator[Board]:
    console = Console(stderr=True)
    if quiet:
        yield lambda jobs: None
    elif console.is_terminal and not console.is_dumb_terminal:
        columns = (
            TextColumn("{task.fields[job]}", style="bold", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[iterations]}"),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=console, expand=True) as bars:
            yield _Bars(bars).show
    else:
        yield _Lines().show


def _text(job: JobSummary) -> str:
    parts = [job.state.value]
    if job.workers:
        parts.append(count(job.workers, "worker"))
    if job.loss is not None:
        parts.append(f"loss {number(job.loss)}")
    if job.seconds_left is not None and not job.state.is_final:
        parts.append(f"{clock(job.seconds_left)} left")
    if job.reason and not job.workers:
        parts.append(job.reason)
    return printable("  ".join(parts))


class _Bars:
    """A terminal: one bar for each job."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def show(self, jobs: Iterable[JobSummary]) -> None:
        for job in jobs:
            if job.id not in self._tasks:
                self._tasks[job.id] = self._bars.add_task("", total=None, job=job.id, iterations="")
            self._bars.update(
                self._tasks[job.id],
                total=job.iterations_total,
                completed=job.iteration,
                description=_text(job),
                iterations=iterations(job),
            )


class _Lines:
    """A file or a pipe: a line for each change of state or of workers, and every few seconds."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[tuple[str, int], float]] = {}

    def show(self, jobs: Iterable[JobSummary]) -> None:
        now = time.monotonic()
        for job in jobs:
            shape = (job.state.value, job.workers)
            before, since = self._shown.get(job.id, (None, now))
            if shape != before or (now - since >= PLAIN_SECONDS and not job.state.is_final):
                self._shown[job.id] = (shape, now)
                print(f"{job.id}  {iterations(job)}  {_text(job)}", file=sys.stderr, flush=True)
