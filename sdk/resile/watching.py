"""What `Job.watch` shows: a live chart of slots and loss in a notebook, elsewhere a line for each change."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from math import isfinite
from typing import Any

from resile_shared.http.api import JobSummary, JobView

from .svg_chart import Chart, Series, line_chart, stacked_chart

MAX_POINTS = 2000
"""A curve with more points than this drops every other one."""


@dataclass
class Watched:
    """What was seen of one job since the watch began."""

    slots: list[tuple[float, float]] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, view: JobSummary, *, seconds: float) -> None:
        """Keep what is new."""
        self.seconds = seconds
        if not self.slots or self.slots[-1][1] != view.workers:
            self.slots.append((seconds, view.workers))
        if view.loss is not None and isfinite(view.loss) and (not self.losses or self.losses[-1][0] != view.iteration):
            self.losses.append((view.iteration, view.loss))
        for points in (self.slots, self.losses):
            if len(points) > MAX_POINTS:
                del points[1:-1:2]

    def html(self, view: JobView) -> str:
        """Return the chart, and one line about the job."""
        most = max((value for _, value in self.slots), default=0.0)
        slots = Chart(
            "slots over time", "seconds", "slots", self.seconds or 1.0, max(most, 1.0) * 1.15, width=640, height=150
        )
        drawn = [stacked_chart(slots, [Series("slots", self.slots)])]
        if self.losses:
            values = [loss for _, loss in self.losses]
            losses = Chart(
                "loss",
                "iteration",
                "loss",
                float(self.losses[-1][0]),
                max(values) or 1.0,
                y_min=min(0.0, *values),
                width=640,
                height=190,
            )
            drawn.append(line_chart(losses, [Series("loss", self.losses)]))
        error = f"<pre>{escape(view.details)}</pre>" if view.details else ""
        return f'<div style="max-width:680px"><p>{escape(line(view))}</p>{"".join(drawn)}{error}</div>'


def line(view: JobSummary) -> str:
    """Return one line about the job."""
    total = "" if view.iterations_total is None else f" of {view.iterations_total}"
    loss = "" if view.loss is None else f", loss {view.loss:.4g}"
    why = f" ({view.reason})" if view.reason else ""
    return (
        f"{view.name} ({view.id}): {view.state}{why}, {view.workers} workers, iteration {view.iteration}{total}{loss}"
    )


def display_for(job: str) -> Callable[[JobView], None]:
    """Return what displays each view of a job where this program runs."""
    return _NotebookDisplay(job) if _is_notebook() else _TextDisplay()


class _TextDisplay:
    """Prints a line when the state or the number of workers has changed."""

    def __init__(self) -> None:
        self._shown: tuple[object, ...] = ()

    def __call__(self, view: JobView) -> None:
        shown = (view.state, view.workers)
        if shown != self._shown:
            self._shown = shown
            print(line(view), flush=True)


class _NotebookDisplay:
    """Draws one chart, and replaces it with each look."""

    def __init__(self, job: str) -> None:
        self._display: Any = import_module("IPython.display").display
        self._id = f"resile-{job}-{time.monotonic_ns()}"
        self._began = time.monotonic()
        self._watched = Watched()
        self._is_shown = False

    def __call__(self, view: JobView) -> None:
        self._watched.add(view, seconds=time.monotonic() - self._began)
        data = {"text/html": self._watched.html(view), "text/plain": line(view)}
        self._display(data, raw=True, display_id=self._id, update=self._is_shown)
        self._is_shown = True


def _is_notebook() -> bool:
    """Whether this is the kernel of a notebook: IPython is loaded then."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
