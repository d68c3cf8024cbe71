"""The picture of the demo: who had which slots when, how far each job came, and its loss."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from .recording import Recording
from .verdict import Ending

COLOURS, FAINT = ("#1f3b57", "#e8833a"), "#d9d9d9"


def draw(endings: Sequence[Ending], recording: Recording, *, slots: int, title: str, file: Path) -> None:
    """Write the picture to ``file`` as PNG."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    shares, progress, losses = figure.subplots(3, sharex=True, height_ratios=[1.3, 1.1, 1.3])
    figure.suptitle(title, fontsize=11)
    for axes in (shares, progress, losses):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0)
        for moment in _moments(endings):
            axes.axvline(moment, color=FAINT, linewidth=1, zorder=0)
    _draw_shares(shares, endings, slots)
    for ending, colour in zip(endings, COLOURS, strict=True):
        points = recording.points[ending.job.id]
        told = [point for point in points if point.loss is not None]
        progress.plot([p.seconds for p in points], [p.iteration for p in points], color=colour, linewidth=2)
        losses.plot([p.seconds for p in told], [p.loss for p in told], color=colour, linewidth=1.5)
    progress.set_ylabel("iterations completed")
    losses.set_ylabel("training loss")
    losses.set_xlabel("seconds")
    figure.align_ylabels([shares, progress, losses])
    figure.savefig(file, dpi=120)


def _moments(endings: Sequence[Ending]) -> list[float]:
    return sorted({stretch.begin for ending in endings for stretch in ending.stretches})


def _draw_shares(axes: Axes, endings: Sequence[Ending], slots: int) -> None:
    """Stack the slots of the jobs over time."""
    edges = sorted(
        {moment for ending in endings for stretch in ending.stretches for moment in (stretch.begin, stretch.end)}
    )
    below = [0] * (len(edges) - 1)
    for ending, colour in zip(endings, COLOURS, strict=True):
        held = [_workers(ending, (edges[n] + edges[n + 1]) / 2) for n in range(len(edges) - 1)]
        above = [low + more for low, more in zip(below, held, strict=True)]
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, alpha=0.9, label=ending.part.name)
        for stretch in ending.stretches:
            middle = (stretch.begin + stretch.end) / 2
            position = sum(edge <= middle for edge in edges) - 1
            if stretch.workers and stretch.end - stretch.begin > (edges[-1] - edges[0]) / 40:
                height = (below[position] + above[position]) / 2
                axes.annotate(str(stretch.workers), (middle, height), ha="center", va="center", color="white")
        below = above
    axes.set_ylim(0, slots * 1.25)
    axes.yaxis.set_major_locator(MultipleLocator(2))
    axes.set_ylabel("slots")
    axes.legend(frameon=False, ncols=2, loc="upper right")


def _workers(ending: Ending, moment: float) -> int:
    return next((s.workers for s in ending.stretches if s.begin <= moment < s.end), 0)
