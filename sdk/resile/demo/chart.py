"""The picture of the demo: sizes, losses and speeds of both runs over their iterations."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from .recording import Recording

ELASTIC, UNDISTURBED, FAINT = "#e8833a", "#1f3b57", "#d9d9d9"


def draw(elastic: Recording, undisturbed: Recording, *, title: str, file: Path) -> None:
    """Write the picture to ``file`` as PNG."""
    figure = Figure(figsize=(9, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    sizes, losses, speeds = figure.subplots(3, sharex=True, height_ratios=[1.1, 1.5, 1.1])
    figure.suptitle(title, fontsize=11)
    for axes in (sizes, losses, speeds):
        _prepare(axes, elastic)
    _draw_sizes(sizes, elastic, undisturbed)
    _draw_losses(losses, elastic, undisturbed)
    _draw_speeds(speeds, elastic, undisturbed)
    speeds.set_xlabel("iteration")
    figure.align_ylabels([sizes, losses, speeds])
    figure.savefig(file, dpi=120)


def _prepare(axes: Axes, elastic: Recording) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    for stretch in elastic.stretches()[1:]:
        axes.axvline(stretch.first, color=FAINT, linewidth=1, zorder=0)
    axes.margins(x=0)


def _draw_sizes(axes: Axes, elastic: Recording, undisturbed: Recording) -> None:
    for recording, color in ((elastic, ELASTIC), (undisturbed, UNDISTURBED)):
        stretches = recording.stretches()
        edges = [*(stretch.first for stretch in stretches), stretches[-1].last]
        axes.stairs([stretch.workers for stretch in stretches], edges, color=color, linewidth=2, baseline=None)
    for stretch in elastic.stretches():
        middle = (stretch.first + stretch.last) / 2
        axes.annotate(str(stretch.workers), (middle, stretch.workers), (0, 4), textcoords="offset points", ha="center")
    axes.set_ylabel("workers")
    axes.yaxis.set_major_locator(MultipleLocator(2))
    axes.set_ylim(0, 1.3 * max(stretch.workers for stretch in elastic.stretches()))


def _draw_losses(axes: Axes, elastic: Recording, undisturbed: Recording) -> None:
    shared = sorted(elastic.losses.keys() & undisturbed.losses.keys())  # progress is told a few times a second at most
    for recording, color, width, label in (
        (elastic, ELASTIC, 5.0, "the number of workers changes"),
        (undisturbed, UNDISTURBED, 1.2, "one worker, undisturbed"),
    ):
        losses = [recording.losses[iteration] for iteration in shared]
        axes.plot(shared, losses, color=color, linewidth=width, label=label)
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)


def _draw_speeds(axes: Axes, elastic: Recording, undisturbed: Recording) -> None:
    for recording, color in ((elastic, ELASTIC), (undisturbed, UNDISTURBED)):
        for stretch in recording.stretches():
            speeds = list(recording.speeds(stretch))
            axes.plot([speed.iteration for speed in speeds], [speed.per_second for speed in speeds], color=color)
    axes.set_ylabel("iterations / s")
    axes.set_ylim(bottom=0)
