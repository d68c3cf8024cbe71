"""`resile top`: jobs and hosts, live."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from resile_shared.http.api import HostView, JobSummary
from resile_shared.messages.hosts import HostState
from resile_shared.text import printable

from ..client import AsyncClient
from .tables import clock, count, iterations, number
from .waiting import poll

Seen = tuple[Sequence[JobSummary], Sequence[HostView]]
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_MAX_OVER = 5


async def look(client: AsyncClient) -> Seen:
    """Return all jobs and all hosts as they are now."""
    return await client.jobs(), await client.hosts()


async def show(client: AsyncClient) -> None:
    """Show them until interrupted; once, where there is no terminal."""
    console = Console()
    if not console.is_terminal:
        Console(width=160).print(view(await look(client), url=client.server.url))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async for seen in poll(lambda: look(client)):
            live.update(view(seen, url=client.server.url), refresh=True)


def view(seen: Seen, *, url: str) -> Group:
    """Draw jobs and hosts."""
    jobs, hosts = seen
    here = [host for host in hosts if host.state in (HostState.UP, HostState.DRAINING)]
    slots = [slot for host in here for slot in host.slots]
    busy = sum(slot.job is not None for slot in slots)
    colours = {job.id: _COLOURS[number % len(_COLOURS)] for number, job in enumerate(jobs)}
    title = Text(f"{url}   {count(len(here), 'host')}, {count(len(slots), 'slot')}, {busy} busy", style="bold")
    return Group(title, Text(), _jobs(jobs, colours), Text(), _hosts(hosts, colours))


def _jobs(jobs: Sequence[JobSummary], colours: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("JOB", "STATE", "PRIORITY", "SLOTS", "", "ITERATION", "LOSS", "LEFT"):
        table.add_column(heading, no_wrap=True)
    table.add_column("WHY")  # this column shrinks when the others leave too little room
    over = [job for job in jobs if job.state.is_final][-_MAX_OVER:]
    for job in [job for job in jobs if not job.state.is_final] + over:
        table.add_row(
            Text(job.id, style=colours[job.id]),
            job.state.value,
            str(job.priority),
            str(job.workers),
            ProgressBar(total=job.iterations_total, completed=job.iteration, width=10, pulse=False)
            if job.iterations_total
            else "",
            iterations(job),
            number(job.loss),
            clock(job.seconds_left) if job.seconds_left is not None else "-",
            Text(printable(job.reason), no_wrap=True, overflow="ellipsis"),
        )
    return table


def _hosts(hosts: Sequence[HostView], colours: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("HOST", "STATE", "SLOTS"):
        table.add_column(heading)
    for host in hosts:
        cells = Text()
        for slot in host.slots:
            style = colours.get(slot.job, "") if slot.job else "dim"
            cells.append(f"{slot.job or '-'} ", style=style)
        table.add_row(host.id, host.state.value, cells)
    return table
