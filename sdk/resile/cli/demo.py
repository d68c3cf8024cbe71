"""`resile demo`: shows the two runs, compares them, and turns the verdict into an exit status."""

import os
from collections.abc import Callable
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from resile_learner.local.plan import Step
from resile_shared.errors import UsageError

from ..demo.story import ELASTIC, UNDISTURBED, Run, check_needs, train
from ..demo.verdict import faults, used_once
from .display import open_display
from .pace import clock

SHORT_SHA = 16


def show(*, home: Path, output: Path, as_json: bool) -> int:
    """Run the demo; return the exit status."""
    check_needs()
    _check_output(output)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    sizes = ", ".join(str(step.workers) for step in ELASTIC)
    cores = len(os.sched_getaffinity(0))
    console.print("A small network learns handwritten digits, twice.")
    console.print(f"This machine has {cores} core(s); workers beyond that share them, and make nothing faster.")
    console.print(f"\n1. elastic: {sizes} workers", style="bold")
    elastic = _train("elastic", ELASTIC, home=home, as_json=as_json)
    console.print("\n2. undisturbed: one worker", style="bold")
    undisturbed = _train("undisturbed", UNDISTURBED, home=home, as_json=as_json)

    found = faults(elastic, undisturbed)
    _draw(elastic, undisturbed, same=not found, output=output)
    console.print()
    console.print(_comparison(elastic, undisturbed))
    console.print()
    for fault in found:
        console.print(f"WRONG: {fault}", style="bold red")
    if not found:
        console.print("SAME BITS: the parameters of both runs are equal, bit for bit.", style="bold green")
    console.print(f"picture: {output}")
    if as_json:
        runs = {run.name: run.result.as_json() for run in (elastic, undisturbed)}
        print(orjson.dumps({"faults": found, "picture": str(output), **runs}).decode(), flush=True)
    return 1 if found else 0


def _check_output(output: Path) -> None:
    if output.suffix != ".png":
        raise UsageError(f"-o {output}: the picture is a PNG, so give a name that ends with .png")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {output}: the folder {output.parent} cannot be made: {error.strerror}") from error
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise UsageError(f"-o {output} cannot be written: name another file")


def _train(name: str, plan: tuple[Step, ...], *, home: Path, as_json: bool) -> Run:
    with open_display(as_json=as_json, quiet=False) as display:
        return train(name, plan, home=home, on_event=display)


def _draw(elastic: Run, undisturbed: Run, *, same: bool, output: Path) -> None:
    from ..demo.chart import draw  # only now: matplotlib takes a second to import

    title = f"One training, twice: both ended {'with the same bits' if same else 'NOT alike'}"
    draw(elastic.recording, undisturbed.recording, title=title, file=output)


def _comparison(*runs: Run) -> Table:
    rows: dict[str, Callable[[Run], str]] = {
        "workers": lambda run: ", ".join(str(step.workers) for step in run.visited),
        "time": lambda run: clock(run.result.seconds),
        "iterations": lambda run: str(run.completed.iteration),
        "validation accuracy": lambda run: f"{run.completed.validation['accuracy']:.1%}",
        "every sample once": _ledger,
        "params sha256": lambda run: f"{run.completed.params_sha256[:SHORT_SHA]}...",
    }
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="none")
    for heading in ("", *(run.name for run in runs)):
        table.add_column(heading, no_wrap=True)
    for label, tell in rows.items():
        table.add_row(label, *map(tell, runs))
    return table


def _ledger(run: Run) -> str:
    epochs = run.completed.ledger
    return f"in {sum(map(used_once, epochs))} of {len(epochs)} epochs"
