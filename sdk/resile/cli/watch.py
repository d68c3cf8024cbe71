"""The commands that follow a pool: events, logs, wait, top."""

import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from resile_shared.text import printable

from .options import DEFAULT_HOME, AnyJob, AsJson, Home, Server, print_json, reach, show

if TYPE_CHECKING:
    from resile_shared.http.api import JobSummary, LogEntry

    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None)
V = TypeVar("V")

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Keep printing new entries; with --json one object a line.")
]
MAX_TAIL = 10_000
"""The pool sends at most this many entries at once."""
DEFAULT_LINES = 1000
Tail = Annotated[
    int,
    typer.Option(
        "--tail", metavar="N", min=0, max=MAX_TAIL, help=f"Number of newest entries to start with, at most {MAX_TAIL}."
    ),
]
TailLines = Annotated[
    int | None,
    typer.Option(
        "--tail",
        metavar="N",
        min=0,
        max=MAX_TAIL,
        help=f"Number of newest lines to start with, at most {MAX_TAIL}. Default: {DEFAULT_LINES}.",
    ),
]


@app.command(short_help="Show the events of the pool, or of one job.")
def events(
    job: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only events of this job.")] = None,
    *,
    follow: Follow = False,
    tail: Tail = 50,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Show the events of the pool, or of one job, oldest first.

    \b
    resile events -f                  all events, as they happen
    resile events digits-7f3a2c       the events of one job
    """
    from .tables import event_line

    async def work(client: "AsyncClient") -> None:
        found = await client.find(job, newest=True) if job else None
        if follow:
            await _print_each(client.follow_events(job=found, tail=tail), event_line, as_json=as_json)
            return
        seen = await client.events(job=found, tail=tail)
        show({"events": seen}, map(event_line, seen), as_json=as_json)

    reach(work, server=server, home=home)


@app.command(short_help="Show the output of a job's workers.")
def logs(
    job: AnyJob,
    *,
    follow: Follow = False,
    tail: TailLines = None,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Show the output of a job's workers.

    \b
    resile logs digits-7f3a2c -f            until the job ends
    resile logs digits-7f3a2c --tail 20     the last lines

    The pool keeps the newest 20,000 batches of lines of each job. If older lines are not shown, stderr says so.
    """

    async def work(client: "AsyncClient") -> None:
        found = await client.find(job, newest=True)
        if follow:
            lines = client.follow_logs(found, tail=DEFAULT_LINES if tail is None else tail)
            await _print_each(lines, _log_line, as_json=as_json)
            return
        num_lines = DEFAULT_LINES if tail is None else tail
        seen = await client.logs(found, tail=min(num_lines + 1, MAX_TAIL))
        is_cut = len(seen) > num_lines or len(seen) == MAX_TAIL
        seen = seen[-num_lines:] if num_lines else ()
        show({"lines": seen}, map(_log_line, seen), as_json=as_json)
        if is_cut and (tail is None or tail == MAX_TAIL):
            more = "" if num_lines == MAX_TAIL else f"; --tail N shows up to {MAX_TAIL}"
            typer.echo(f"older lines are not shown: these are the newest {num_lines}{more}", err=True)

    reach(work, server=server, home=home)


@app.command(
    short_help="Wait until jobs end.",
    epilog="Exit status: 0 if all completed, 1 if one failed or was stopped, 130 interrupted (the jobs continue).",
)
def wait(
    jobs: Annotated[list[str], typer.Argument(metavar="ID...", help="The jobs, by id or name.")],
    *,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    """Wait until jobs end, and show their progress on stderr."""
    from . import waiting

    async def work(client: "AsyncClient") -> "tuple[JobSummary, ...]":
        return await waiting.wait(client, jobs, quiet=as_json)

    ended = reach(work, server=server, home=home)
    if as_json:
        print_json({"jobs": ended})
    wrong = [job for job in ended if job.state.value != "completed"]
    for job in wrong:
        why = f": {printable(job.reason)}" if job.reason else ""
        print(f"resile: {job.id} {job.state.value}{why}; `resile logs {job.id}` shows its output", file=sys.stderr)
    return 1 if wrong else 0


@app.command(short_help="Show jobs and hosts, live.")
def top(*, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show jobs and hosts, live, until Ctrl-C; once if stdout is not a terminal."""
    from . import top as screen

    async def work(client: "AsyncClient") -> None:
        if as_json:
            seen_jobs, seen_hosts = await screen.look(client)
            print_json({"jobs": seen_jobs, "hosts": seen_hosts})
        else:
            await screen.show(client)

    reach(work, server=server, home=home)


def _log_line(entry: "LogEntry") -> str:
    source = f"environment on {entry.host}" if entry.worker is None else f"worker {entry.worker}"
    return f"[{'note' if entry.stream == 'note' else source}] {entry.text}"


async def _print_each(items: AsyncIterator[V], line: Callable[[V], str], *, as_json: bool) -> None:
    """Print items as they come."""
    async for item in items:
        show(item, [line(item)], as_json=as_json)
