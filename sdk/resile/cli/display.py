"""What the user sees of a run: a live bar on a terminal, a line for each epoch anywhere else."""

import sys
import time
from collections import deque
from math import ceil
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from resile_shared.messages import reports
from resile_shared.messages.reports import Ready

from ..local.events import (
    Noted,
    Printed,
    Progressed,
    Rescaled,
    RunEvent,
    RunOpened,
    Saved,
    TrainingCalled,
)
from .lenient import LenientStream
from .tables import clock, count

PLAIN_SECONDS = 60.0
"""Where there is no terminal, a line is shown at least this often, however long an epoch takes."""
MAX_EPOCH_LINES = 100
"""Of a run with more epochs, every second, third, ... epoch has a line."""
_BEGIN_ANEW = "variables of the script begin anew, except those around a prepared loader's loops and in state={...}"


WINDOW_SECONDS = 10.0


class Pace:
    """Iterations per second over a sliding window, and the remaining time at that speed."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, iteration: int, now: float) -> None:
        """Record that ``iteration`` iterations were complete at ``now``."""
        self._points.append((now, iteration))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_SECONDS:
            self._points.popleft()

    @property
    def per_second(self) -> float | None:
        """Iterations per second; None before there are two points."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    def seconds_left(self, iterations: int) -> float | None:
        """Return the seconds that ``iterations`` more will take."""
        speed = self.per_second
        return iterations / speed if speed else None


class Screen(Protocol):
    """Where lines and progress go. What cannot be shown is lost: training goes on."""

    def line(self, text: str) -> None:
        """Show a line of ours."""

    def printed(self, text: str, *, to_stderr: bool) -> None:
        """Show a line that a worker printed."""

    def progress(self, done: int, total: int, text: str, *, is_milestone: bool) -> None:
        """Show how far training has come; a milestone is shown for good."""

    def close(self) -> None:
        """Remove what is only shown during training."""


class Display:
    """Turns the events of a run into what a screen shows."""

    def __init__(self, screen: Screen, *, quiet: bool) -> None:
        self._screen = screen
        self._quiet = quiet
        self._pace = Pace()
        self._total = 0
        self._num_epochs = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.close()

    def __call__(self, event: RunEvent) -> None:
        """Show ``event``, if it is worth it."""
        if isinstance(event, Printed):
            self._printed(event)
        elif not self._quiet:
            self._show(event)

    def note(self, text: str) -> None:
        """Show a line of ours."""
        if not self._quiet:
            self._screen.line(text)

    def _printed(self, event: Printed) -> None:
        if event.is_lowest_rank:
            self._screen.printed(event.line, to_stderr=event.stream == "stderr")
        elif event.stream == "stderr":
            self._screen.printed(f"[worker {event.worker}] {event.line}", to_stderr=True)

    def _show(self, event: RunEvent) -> None:
        match event:
            case RunOpened(job=job, folder=folder, is_resumed=is_resumed):
                self._screen.line(f"{'resuming' if is_resumed else 'run'} {job} in {folder}")
                if is_resumed:
                    self._screen.line(f"note: {_BEGIN_ANEW}")
            case TrainingCalled(ready=ready):
                self._total, self._num_epochs = ready.iterations_total, max(1, ready.epochs)
                self._screen.line(training_call(ready))
            case Rescaled():
                self._screen.line(_rescaled(event))
            case Saved(checkpoint=checkpoint):
                size = checkpoint.num_bytes / 1e6
                self._screen.line(f"iteration {checkpoint.iteration}: checkpoint saved ({size:.1f} MB)")
            case Noted(text=text):
                self._screen.line(f"note: {text}")
            case Progressed():
                self._progressed(event)
            case _:
                pass

    def _progressed(self, event: Progressed) -> None:
        progress = event.progress
        self._pace.add(progress.iteration, time.monotonic())
        parts = [f"epoch {progress.epoch}", count(event.workers, "worker")]
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.4g}")
        if speed := self._pace.per_second:
            parts.append(f"{speed:.3g} it/s")
        total = max(progress.iteration, self._total)  # of a stream, it is estimated
        if left := self._pace.seconds_left(total - progress.iteration):
            parts.append(f"{clock(left)} left")
        self._screen.progress(progress.iteration, total, "  ".join(parts), is_milestone=self._is_milestone(progress))

    def _is_milestone(self, progress: reports.Progress) -> bool:
        """Whether an epoch has ended that has a line."""
        ended = progress.epoch + 1
        return progress.ends_epoch and (
            ended % ceil(self._num_epochs / MAX_EPOCH_LINES) == 0 or ended == self._num_epochs
        )


def training_call(ready: Ready) -> str:
    """What a script trains, in a line."""
    estimated = "" if ready.has_fixed_length else "about "
    iterations, epochs = count(ready.iterations_total, "iteration"), count(ready.epochs, "epoch")
    return (
        f"{estimated}{iterations}: {epochs} of {ready.samples} samples, "
        f"batches of {ready.batch_size} in {count(ready.num_shards, 'shard')}"
    )


def _rescaled(event: Rescaled) -> str:
    before = f"{event.before} -> " if event.before else ""
    pause = f", pause {event.pause_seconds * 1000:.0f} ms" if event.before else ""
    workers = count(event.after, "worker")
    return f"iteration {event.iteration}: {before}{workers} (generation {event.generation}{pause}): {event.reason}"


class LiveScreen:
    """A terminal: a bar that moves, and lines above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.description}", style="bold"),
            console=console,
            transient=True,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting workers", total=None, visible=False)
        self._bar.start()

    def line(self, text: str) -> None:
        """Show a line above the bar."""
        self._console.print(Text(text, style="cyan"), soft_wrap=True)

    def printed(self, text: str, *, to_stderr: bool) -> None:
        """Show a worker's line above the bar, or in the file that stderr was sent to."""
        if to_stderr and not sys.stderr.isatty():
            print(text, file=LenientStream(sys.stderr))
        else:
            self._console.print(Text.from_ansi(text), soft_wrap=True)

    def progress(self, done: int, total: int, text: str, *, is_milestone: bool) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, total=total, description=text, visible=True)

    def close(self) -> None:
        """Take the bar down."""
        self._bar.stop()


class PlainScreen:
    """A file or a pipe: lines only."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = to_stderr
        self._last = time.monotonic()

    def line(self, text: str) -> None:
        """Show a line."""
        self.printed(text, to_stderr=False)

    def printed(self, text: str, *, to_stderr: bool) -> None:
        """Show a worker's line."""
        stream = sys.stderr if to_stderr or self._to_stderr else sys.stdout
        print(text, file=LenientStream(stream), flush=True)

    def progress(self, done: int, total: int, text: str, *, is_milestone: bool) -> None:
        """Show a line of a milestone, or if the last one is some time ago."""
        now = time.monotonic()
        if is_milestone or now - self._last >= PLAIN_SECONDS:
            self._last = now
            self.line(f"iteration {done}/{total}  {text}")

    def close(self) -> None:
        """Nothing is left to take down."""


def open_display(*, as_json: bool, quiet: bool) -> Display:
    """Choose the screen for this process's stdout; with ``as_json``, stdout belongs to the JSON object."""
    console = Console(file=LenientStream(sys.stderr if as_json else sys.stdout))
    if console.is_terminal and not quiet and not console.is_dumb_terminal:
        return Display(LiveScreen(console), quiet=quiet)
    return Display(PlainScreen(to_stderr=as_json), quiet=quiet)
