"""The command that shows what changed in a job, and the steps of one change."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError

from .options import Answer, AnyJob, pool_command
from .tables import columns

if TYPE_CHECKING:
    from resile_shared.http.api import ChangeView, TraceSpan, TraceView

    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None)

_MESSAGE = re.compile(r"(handle|answer|ask|publish) resile\.|carry out$")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
_BAR = 40
_NAME = 58


@pool_command(app, short_help="Show what changed in a job, and how long each step took.")
async def trace(
    client: "AsyncClient",
    job: AnyJob,
    change: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHANGE]", help="A number of the list, the beginning of a trace id, or `last`. Default: the list."
        ),
    ] = None,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Also show messages and steps for other jobs; in the list, show all checkpoints."),
    ] = False,
) -> Answer:
    r"""Show the changes of a job, or the steps of one as a waterfall.

    \b
    resile trace digits-7f3a2c
    resile trace digits-7f3a2c 4
    """
    id_ = await client.find(job, newest=True)
    changes = await client.changes(id_)
    if change is None:
        return {"changes": changes}, _list(changes, show_all=show_all)
    chosen = _choose(changes, change)
    if chosen.trace is None:
        raise UsageError(f"the steps of change {change} are not known yet: try again in a second")
    view = await client.trace(chosen.trace)
    link = ("", chosen.url) if chosen.url else ()
    lines = (_local(chosen.summary), "", *_waterfall(view, job=None if show_all else id_), *link)
    return {"change": chosen, "trace": view}, lines


def _choose(changes: "Sequence[ChangeView]", name: str) -> "ChangeView":
    """Return the change that ``name`` names: a number, `last`, or the beginning of a trace id. Raises UsageError."""
    if name == "last" and changes:
        return changes[-1]
    found = [change for change in changes if name.isdecimal() and int(name) in change.items]
    found = found or [change for change in changes if change.trace and change.trace.startswith(name)]
    if len(found) != 1:
        what = "more than one change begins" if found else "the job has no change"
        raise UsageError(f"{what} with {name!r}: `resile trace` with the job alone lists them")
    return found[0]


def _list(changes: "Sequence[ChangeView]", *, show_all: bool) -> Iterator[str]:
    checkpoints = [change for change in changes if change.kind == "checkpoint"]
    left_out = [] if show_all else checkpoints[:-1]
    shown = [change for change in changes if not any(change is other for other in left_out)]
    yield from _table(shown)
    if left_out:
        yield f"{len(left_out)} older checkpoints: --all shows them"


def _table(changes: "Sequence[ChangeView]") -> Iterator[str]:
    heading = ("CHANGE", "WHAT", "WORKERS", "TOOK", "STEPS", "SUMMARY")
    return columns(
        heading,
        (
            (
                str(change.number) if change.number else (change.trace or "")[:8],
                change.kind,
                "" if change.kind == "checkpoint" else f"{change.workers_before} -> {change.workers}",
                "-" if change.seconds is None else _duration(change.seconds),
                "kept" if change.has_spans else "-",
                _local(change.summary),
            )
            for change in changes
        ),
    )


def _waterfall(view: "TraceView", *, job: str | None) -> Iterator[str]:
    """Yield a line for each step: when it began, how long it took, and a bar; with ``job`` those about it alone."""
    rows = list(_rows(view.spans, job=job))
    begin = min((span.begin for span, _ in rows), default=0.0)
    end = max((span.begin + span.seconds for span, _ in rows), default=0.0)
    for span, depth in rows:
        name = f"{'  ' * min(depth, 8)}{span.name}{_about(span)}"[:_NAME].ljust(_NAME)
        yield f"{_duration(span.begin - begin):>8} {_duration(span.seconds):>8}  {name}  {_bar(span, begin, end)}"
    if view.dropped:
        yield f"{view.dropped} more steps were dropped"


def _rows(spans: "Sequence[TraceSpan]", *, job: str | None) -> "Iterator[tuple[TraceSpan, int]]":
    """Yield the steps in the order of the tree, with their depth; what is left out hands its place to its parent."""
    by_id = {span.id: span for span in spans}
    shown = {span.id for span in spans if job is None or not _is_aside(span, job)}
    children: dict[str | None, list[TraceSpan]] = {}
    for span in spans:
        parent = None if span.name == "attack" else by_id.get(span.parent or "")  # it came before everything else
        while parent is not None and parent.id not in shown:
            parent = by_id.get(parent.parent or "")
        if span.id in shown:
            children.setdefault(parent.id if parent else None, []).append(span)
    waiting = [(span, 0) for span in reversed(children.get(None, []))]
    while waiting:
        span, depth = waiting.pop()
        yield span, depth
        waiting += ((child, depth + 1) for child in reversed(children.get(span.id, [])))


def _is_aside(span: "TraceSpan", job: str) -> bool:
    return bool(_MESSAGE.match(span.name)) or span.attributes.get("resile.job", job) != job


def _about(span: "TraceSpan") -> str:
    known = span.attributes
    if attack := known.get("resile.attack"):
        return f": {attack}"
    worker = f" worker {known['resile.worker']}" if "resile.worker" in known else ""
    iteration = f" {known['resile.iteration']}" if "resile.iteration" in known else ""
    return f"{iteration}{worker}" or f" ({span.service})"


def _bar(span: "TraceSpan", begin: float, end: float) -> str:
    scale = _BAR / (end - begin or 1.0)
    first = min(_BAR - 1, int((span.begin - begin) * scale))
    return " " * first + "=" * max(1, min(_BAR - first, round(span.seconds * scale)))


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _local(text: str) -> str:
    """Return a text with its times as clocks here show them."""
    return _TIME.sub(lambda found: _clock(found[0]), text)


def _clock(time: str) -> str:
    return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S.%f")[:-3]
