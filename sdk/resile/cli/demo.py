"""`resile demo`: runs the story on its own pool, compares the results, and returns the exit status."""

import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import orjson
from rich.console import Console
from rich.live import Live
from rich.table import Table

from resile_shared.control_groups import num_processors
from resile_shared.errors import ResileError, UsageError
from resile_shared.http.api import HostView, JobSummary, JobView

from ..client import AsyncClient, find_server
from ..demo.idle import idle_slots
from ..demo.report import html
from ..demo.story import FIRST, NUM_HOSTS, NUM_SLOTS, SCRIPT, SECOND, SLOTS_PER_HOST, Look, Story
from ..demo.verdict import Ending, endings, faults, used_once
from .administration import page_link
from .top import view

NEEDS = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
SHORT_SHA = 16


def show(*, home: Path | None, output: Path, as_json: bool) -> int:
    """Run the demo; return the exit status."""
    _check_needs()
    _check_output(output)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        if home is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resile-demo-")))
        return asyncio.run(_show(home, output, console, as_json=as_json))


async def _show(home: Path, output: Path, console: Console, *, as_json: bool) -> int:
    from ..demo.story import train_undisturbed

    cores = num_processors()
    console.print(f"Two jobs learn handwritten digits on a pool of {NUM_HOSTS} hosts of {SLOTS_PER_HOST} slots.")
    console.print(f"This machine has {cores} core(s); more workers share them, and make nothing faster.\n")
    story, jobs = await _run_story(home, console)
    console.print("\nThe same two jobs, each alone on one worker ...")
    alone = await train_undisturbed((FIRST, SECOND), home=home / "undisturbed")
    shas = [result.completed.params_sha256 for result in alone if result.completed]
    ended = endings((FIRST, SECOND), jobs, story.recording, shas)
    found = [fault for ending in ended for fault in faults(ending)]

    from ..demo.chart import draw  # only now: matplotlib takes a second to import

    title = f"Two jobs share a pool, and both ended {'as if alone, bit for bit' if not found else 'NOT as promised'}"
    draw(ended, story.recording, slots=NUM_SLOTS, title=title, file=output)
    report = output.with_suffix(".html")
    report.write_text(html(ended, story.recording, found, slots=NUM_SLOTS, title=title), encoding="utf-8")
    idle = idle_slots([ending.stretches for ending in ended], story.recording)
    _conclude(console, ended, found, output)
    console.print(f"slots that were idle while a job could use them: {idle.share:.1%} of {idle.of:,.0f} slot-seconds")
    console.print(f"report: {report}")
    if as_json:
        document = {
            "faults": found,
            "picture": str(output),
            "report": str(report),
            "idle": {"slot_seconds": idle.slot_seconds, "of": idle.of, "share": idle.share},
            "jobs": [job.model_dump(mode="json") for job in jobs],
        }
        print(orjson.dumps(document).decode(), flush=True)
    return 1 if found else 0


async def _run_story(home: Path, console: Console) -> tuple[Story, Sequence[JobView]]:
    """Start a pool, run the story on it, and stop it."""
    from ..pool.home import PoolHome
    from ..pool.services import PoolOptions
    from ..pool.supervisor import Supervisor

    console.print("starting the pool: bus, registry, scheduler, monitor, two hosts")
    pool = PoolHome(home)
    ready = asyncio.Event()
    supervisor = Supervisor(pool, PoolOptions(hosts=NUM_HOSTS, slots=SLOTS_PER_HOST), log=console.print)
    running = asyncio.create_task(supervisor.run(lambda url: ready.set()))
    try:
        await asyncio.wait({running, waiting := asyncio.create_task(ready.wait())}, return_when="FIRST_COMPLETED")
        waiting.cancel()
        if running.done():
            running.result()
            raise ResileError("the pool stopped before the demo began: its logs are in logs/ of its home")
        async with AsyncClient(find_server(home=home)) as client:
            console.print(f"watch it in a browser: {page_link(client.server)}\n")
            board, on_look = _board(console, client.server.url)
            story = Story(client, log=console.print, on_look=on_look, kill=supervisor.kill_host)
            with board:
                return story, await story.run()
    finally:
        running.cancel()
        await asyncio.wait({running})
        await supervisor.kill()
        pool.close()


def _board(console: Console, url: str) -> tuple[AbstractContextManager[object], Look]:
    """On a terminal all that happens in the pool, live; elsewhere a line for each change of a job's workers."""
    if console.is_terminal and not console.is_dumb_terminal:
        live = Live(console=console, auto_refresh=False, transient=True)
        return live, lambda jobs, hosts: live.update(view((jobs, hosts), url=url), refresh=True)
    return nullcontext(), _lines(console.print)


def _lines(log: Callable[[str], None]) -> Look:
    shown: dict[str, tuple[int, str]] = {}

    def on_look(jobs: Sequence[JobSummary], hosts: Sequence[HostView]) -> None:
        for job in jobs:
            shape = (job.workers, job.state.value if job.state.is_final else "")
            if shown.setdefault(job.id, (0, "")) != shape:
                shown[job.id] = shape
                log(f"  {job.name}: {shape[1] or f'{job.workers} workers'}, iteration {job.iteration}")

    return on_look


def _conclude(console: Console, ended: Sequence[Ending], found: Sequence[str], output: Path) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="none")
    rows: dict[str, Callable[[Ending], str]] = {
        "workers": lambda ending: ", ".join(str(stretch.workers) for stretch in ending.stretches),
        "iterations": lambda ending: str(ending.job.iteration),
        "validation accuracy": lambda ending: f"{ending.job.validation['accuracy']:.1%}",
        "every sample once": _ledger,
        "params sha256": lambda ending: f"{str(ending.job.params_sha256)[:SHORT_SHA]}...",
        "alone, one worker": lambda ending: f"{ending.alone_sha256[:SHORT_SHA]}...",
    }
    for heading in ("", *(ending.part.name for ending in ended)):
        table.add_column(heading, no_wrap=True)
    for label, tell in rows.items():
        table.add_row(label, *map(tell, ended))
    console.print()
    console.print(table)
    console.print()
    for fault in found:
        console.print(f"WRONG: {fault}", style="bold red")
    if not found:
        console.print("SAME BITS: both jobs have the parameters of undisturbed runs, bit for bit.", style="bold green")
    console.print(f"picture: {output}")


def _ledger(ending: Ending) -> str:
    once = sum(count.num_epochs for count in ending.job.ledger if used_once(count))
    return f"in {once} of {sum(count.num_epochs for count in ending.job.ledger)} epochs"


def _check_needs() -> None:
    """Raise UsageError if this is not Linux, or if a package is missing that only the demo needs."""
    if sys.platform != "linux":
        raise UsageError(
            f"the demo requires Linux; this machine runs {sys.platform}: `python {SCRIPT}` trains in one process"
        )
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        packages = " ".join(missing)
        raise UsageError(f"the demo requires {packages}: install with `{sys.executable} -m pip install {packages}`")


def _check_output(output: Path) -> None:
    if output.suffix != ".png":
        raise UsageError(f"-o {output}: the picture is a PNG, so its name must end with .png")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {output}: the folder {output.parent} cannot be created: {error.strerror}") from error
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise UsageError(f"-o {output} is not writable: choose another file")
