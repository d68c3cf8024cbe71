"""`resile run`: shows a local run, and turns its end into an exit status."""

import asyncio
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from resile_shared.messages.reports import Completed

from ..job_options import COMPAT, COMPAT_MODULES
from ..local.result import Result
from ..local.run import LocalRun
from ..local.settings import RunSettings
from .display import Display, open_display
from .lenient import LenientStream
from .tables import batches_text, clock, ledger_lines


def train(settings: RunSettings, *, as_json: bool, quiet: bool) -> int:
    """Run it; return the exit status."""
    with open_display(as_json=as_json, quiet=quiet) as display:
        watched = _WatchedRun(settings, display)
        result = asyncio.run(watched.run())
    if as_json:
        print(orjson.dumps(result.as_json()).decode(), flush=True)
    if result.outcome.state != "completed":
        return _explain(result, settings, watched.signal)
    if not as_json and not quiet:
        for line in summary(result):
            print(line, file=LenientStream(sys.stdout), flush=True)
    return 0


class _WatchedRun:
    """A run that signals stop."""

    def __init__(self, settings: RunSettings, display: Display) -> None:
        self._local = LocalRun(settings)
        self._display = display
        self.signal: signal.Signals | None = None

    async def run(self) -> Result:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
                loop.add_signal_handler(number, self._stop, number)
        return await self._local.run(self._display)

    def _stop(self, number: signal.Signals) -> None:
        self._local.stop()
        if self.signal is None:
            self.signal = number
            self._display.note("saving a checkpoint, then stopping; press Ctrl-C again to stop at once")


def _explain(result: Result, settings: RunSettings, stopped_by: signal.Signals | None) -> int:
    """Say in one line what happened and what can be done; return the exit status."""
    outcome = result.outcome
    stderr = LenientStream(sys.stderr)
    if outcome.details:
        print(outcome.details.rstrip("\n"), file=stderr)
    if outcome.is_usage_error:
        print(f"resile: {outcome.error}", file=stderr)
        return 2
    if outcome.state == "stopped":
        iteration = result.progress.iteration if result.progress else 0
        what = f"stopped at iteration {iteration}"
    else:
        what = outcome.error
    print(f"resile: {what}; {_advice(result, settings)}", file=stderr)
    return 128 + stopped_by if outcome.state == "stopped" and stopped_by else 1


def _advice(result: Result, settings: RunSettings) -> str:
    if result.model is not None:
        return f"the trained model is {result.model}"
    if not result.can_resume:
        logs = f"the workers' output is in {result.logs}"
        if result.progress is None:
            return logs
        return f"no checkpoint was saved (checkpoint_every in the training call saves them); {logs}"
    words = ["resile", "run", str(settings.script), "--resume", result.job]
    words += [f"--compat={name}" for name, module in COMPAT_MODULES.items() if settings.env.get(COMPAT) == module]
    if settings.home != Path("~/.resile"):
        words += ["--home", str(settings.home)]
    return f"`{shlex.join(words)}` resumes from the newest checkpoint"


def summary(result: Result) -> Iterator[str]:
    """Log the results of a completed run, one line each."""
    completed = result.completed
    assert completed is not None
    for label, value in _rows(result, completed):
        yield f"{label:<13}  {value}"


def _rows(result: Result, completed: Completed) -> Iterator[tuple[str, str]]:
    yield "run", f"{result.job}, {clock(result.seconds)}"
    yield "iterations", f"{completed.iteration}"
    yield "epochs", f"{sum(count.num_epochs for count in completed.ledger)}"
    yield "samples seen", f"{completed.samples_seen}"
    if completed.loss is not None:
        yield "loss", f"{completed.loss:.6g}"
    if completed.metrics:
        yield "metrics", _numbers(completed.metrics)
    if completed.validation:
        yield "validation", _numbers(completed.validation)
    yield from (("ledger", line) for line in ledger_lines(completed.ledger))
    if completed.batches:
        yield "batches", batches_text(completed.batches)
    yield "bits", completed.bits
    yield "params sha256", completed.params_sha256
    if result.model:
        yield "model", result.model
    if result.output:
        yield "output", result.output


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())
