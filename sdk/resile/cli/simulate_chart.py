"""The picture of simulations: the slots of the jobs over time, a panel for each policy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from resile_scheduler.simulation.outcome import JobOutcome, Outcome, Steps

MOST_NAMED = 12
"""The picture has a legend, and shows the numbers of workers, for at most this many jobs."""
NUM_MOMENTS = 2000
"""The picture has at most this many columns."""
UNITS = ((86400.0 * 3, 86400.0, "days"), (3600.0 * 3, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
FREE = "#d9d9d9"
Floats = NDArray[np.float64]


def draw(outcomes: Sequence[Outcome], *, file: Path) -> None:
    """Write the picture to ``file`` as PNG."""
    figure = Figure(figsize=(9, 0.8 + 2.2 * len(outcomes)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(outcomes), sharex=True, squeeze=False)[:, 0]
    longest = max(outcome.end for outcome in outcomes)
    unit, unit_name = next((unit, name) for least, unit, name in UNITS if longest >= least)
    for axes, outcome in zip(panels, outcomes, strict=True):
        _draw_panel(axes, outcome, unit)
    panels[-1].set_xlabel(unit_name)
    panels[-1].set_xlim(0.0, longest / unit)
    if len(outcomes[0].jobs) <= MOST_NAMED:
        panels[0].legend(frameon=False, ncols=6, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(file, dpi=120)


def _draw_panel(axes: Axes, outcome: Outcome, unit: float) -> None:
    """Stack the slots of the jobs over time, below the number of slots there are."""
    edges = _edges(outcome)
    capacity = _at(outcome.capacity, edges[:-1])
    axes.stairs(capacity, edges / unit, color=FREE, linewidth=1.5, baseline=None)
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    below = np.zeros(len(edges) - 1)
    for number, job in enumerate(outcome.jobs):
        held = _at(job.steps, edges[:-1])
        if held.any():
            above = below + held
            colour = colours[number % len(colours)]
            axes.stairs(above, edges / unit, baseline=below, fill=True, color=colour, label=job.submission.job)
            if len(outcome.jobs) <= MOST_NAMED:
                _number(axes, job, outcome, (edges, below, above), unit)
            below = above
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, max(outcome.num_slots, 1) * 1.05)
    axes.set_ylabel("slots")
    axes.set_title(outcome.name, loc="left", fontsize=10)


def _edges(outcome: Outcome) -> Floats:
    """Return the moments of all changes, or as many as the picture can show."""
    moments = {0.0, outcome.end} | {time for job in outcome.jobs for time, _ in job.steps}
    moments |= {time for time, _ in outcome.capacity}
    edges = np.array(sorted(time for time in moments if time <= outcome.end))
    return edges if len(edges) <= NUM_MOMENTS else np.linspace(0.0, outcome.end, NUM_MOMENTS)


def _at(steps: Sequence[tuple[float, int]] | Steps, moments: Floats) -> Floats:
    times = np.array([time for time, _ in steps], dtype=float)
    numbers = np.array([0, *(number for _, number in steps)], dtype=float)
    return numbers[np.searchsorted(times, moments, side="right")]


def _number(axes: Axes, job: JobOutcome, outcome: Outcome, area: tuple[Floats, Floats, Floats], unit: float) -> None:
    """Write the number of workers where there is room for it."""
    edges, below, above = area
    ends = [time for time, _ in job.steps[1:]] + [outcome.end]
    for (begin, workers), end in zip(job.steps, ends, strict=True):
        if workers and end - begin > outcome.end / 40:
            middle = (begin + end) / 2
            column = int(np.searchsorted(edges, middle, side="right")) - 1
            height = (below[column] + above[column]) / 2
            axes.annotate(str(workers), (middle / unit, height), ha="center", va="center", color="white", fontsize=8)
