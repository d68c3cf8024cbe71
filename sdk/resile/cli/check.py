"""`resile check`: tries a few iterations of a script on changing numbers of workers, and reports on one page."""

import asyncio
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from ..local.events import RunEvent
    from ..local.settings import RunSettings
from .options import With, environment, naming_flags, required

app = typer.Typer()
DEFAULT_ITERATIONS = 12
HAS_FINDINGS = 3
"""The exit status of a script that trains, but has findings."""


@app.command(
    short_help="Try a script for a few iterations, and report what would be warned of or refused.",
    epilog="Exit status: 0 nothing to report, 1 it cannot train, 2 invalid arguments, 3 it trains, with findings.",
)
def check(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, after `--`.")
    ] = None,
    *,
    iterations: Annotated[
        int, typer.Option("--iterations", min=6, metavar="N", help="How many iterations to run, at least 6.")
    ] = DEFAULT_ITERATIONS,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K[=V]", help="Set an environment variable in the workers. May be repeated."),
    ] = None,
    packages: With = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    r"""Run the first iterations of SCRIPT on 1, 3 and 1 workers, and report on one page.

    \b
    resile check train.py                   12 iterations
    resile check train.py -- --lr 0.1       with an argument of the script

    What Resile compares and warns of is listed, each with what to do about it. Nothing of the run is kept, but files
    that the script writes itself are written.
    """
    from ..job_options import worker_environment

    with naming_flags():
        variables = worker_environment(environment(env), None)
    report = asyncio.run(_tried(script, tuple(args or ()), iterations, variables, required(packages, None)))
    if as_json:
        print(orjson.dumps(report.as_json()).decode())
    else:
        for line in report.lines():
            print(line)
    return report.status


@dataclass
class Report:
    """What the iterations of a script have shown."""

    script: Path
    iterations: int = 0
    """How many were committed."""
    training: str = ""
    """What the script trains: empty if it has not reached its training call."""
    bits: str = ""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """[(iteration, workers)]"""
    findings: list[str] = field(default_factory=list)
    error: str = ""
    details: str = ""

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return 1 if self.error else HAS_FINDINGS if self.findings else 0

    def lines(self) -> Iterator[str]:
        """The page."""
        yield f"script      {self.script}"
        if self.training:
            yield f"training    {self.training}"
        workers = ", ".join(f"{workers} from iteration {iteration}" for iteration, workers in self.sizes)
        yield f"tried       {self.iterations} iterations; workers: {workers or 'none'}"
        for finding in self.findings:
            yield f"finding     {finding}"
        if self.error:
            yield from self.details.rstrip("\n").splitlines()
            yield f"FAILED      {self.error}"
        else:
            yield f"bits        {self.bits}"
            yield f"result      it trains on any number of workers{', with findings' if self.findings else ''}"

    def as_json(self) -> dict[str, Any]:
        """Return the page as plain values."""
        return {
            "script": str(self.script),
            "training": self.training,
            "iterations": self.iterations,
            "workers": [{"iteration": iteration, "workers": workers} for iteration, workers in self.sizes],
            "findings": self.findings,
            "bits": self.bits or None,
            "error": self.error or None,
        }


async def _tried(
    script: Path, args: tuple[str, ...], iterations: int, env: dict[str, str], requirements: tuple[str, ...]
) -> Report:
    from ..local.plan import parse_plan
    from ..local.settings import RunSettings

    plan = parse_plan(f"0:1,{iterations // 3}:3,{2 * iterations // 3}:1")
    with tempfile.TemporaryDirectory(prefix="resile-check-") as home:
        settings = RunSettings(script, args=args, plan=plan, home=Path(home), env=env, requirements=requirements)
        print(f"trying {script}: about {iterations} iterations", file=sys.stderr)
        return await _Trial(settings, iterations).run()


class _Trial:
    """A run that stops after some iterations."""

    def __init__(self, settings: "RunSettings", iterations: int) -> None:
        from ..local.run import LocalRun  # it loads on Linux only, which the settings have checked

        self._local = LocalRun(settings)
        self._iterations = iterations
        self._report = Report(settings.script)
        self._is_stopping = self._is_interrupted = False

    async def run(self) -> Report:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        result, report = await self._local.run(self._on_event), self._report
        report.bits = result.as_json()["bits"] or report.bits
        if result.outcome.state == "failed":
            report.error, report.details = result.outcome.error, result.outcome.details
        elif self._is_interrupted:
            report.error = "interrupted before the end of the trial"
        return report

    def _interrupt(self) -> None:
        """Stop the run, at once if it is asked for twice."""
        self._is_interrupted = True
        self._local.stop()

    def _on_event(self, event: "RunEvent") -> None:
        from ..local.events import Noted, Progressed, Rescaled, TrainingCalled
        from .display import training_call

        report = self._report
        match event:
            case TrainingCalled(ready=ready):
                report.training, report.bits = training_call(ready), ready.bits
            case Rescaled(iteration=iteration, after=after):
                report.sizes.append((iteration, after))
            case Noted(text=text) if not text.startswith("step "):  # of the plan, after the end of training
                report.findings.append(text)
            case Progressed(progress=progress):
                report.iterations = progress.iteration
                if progress.iteration >= self._iterations and not self._is_stopping:
                    self._is_stopping = True
                    self._local.stop()
            case _:
                pass
