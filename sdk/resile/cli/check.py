"""`resile check`: tries a few iterations of a script on changing numbers of workers, and reports on one page."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from resile_shared.messages.reports import Measurement

    from ..local.events import RunEvent
    from ..local.settings import RunSettings
from .options import With, environment, naming_flags, required
from .tables import count

app = typer.Typer()
DEFAULT_ITERATIONS = 12
_MORE_WORKERS = 3
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

    What Resile compares and warns of is listed, each with what to do about it; and what an iteration took, what more
    workers would gain, and how much memory a worker has had. Nothing of the run is kept, but files
    that the script writes itself are written.
    """
    from ..job_options import worker_environment

    with naming_flags():
        variables = worker_environment(environment(env), None)
    report = try_script(script, args or (), iterations=iterations, env=variables, requirements=required(packages, None))
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
    num_shards: int = 0
    bits: str = ""
    measured: "dict[int, Measurement]" = field(default_factory=dict)
    """By the number of workers."""
    memory: int = 0
    """The most memory that a worker has had, in bytes."""
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
        yield from self._speed()
        for finding in self.findings:
            yield f"finding     {finding}"
        if self.error:
            yield from self.details.rstrip("\n").splitlines()
            yield f"FAILED      {self.error}"
        else:
            yield f"bits        {self.bits}"
            yield f"result      it trains on any number of workers{', with findings' if self.findings else ''}"

    def _speed(self) -> Iterator[str]:
        if self.measured:
            times = [
                f"{count(workers, 'worker')} {1000 * (each.compute_seconds + each.exchange_seconds):.1f} ms"
                for workers, each in sorted(self.measured.items())
            ]
            yield f"iteration   {', '.join(times)}, on this machine"
        if self.estimates:
            gains = [f"{workers} workers {gain:.1f} times" for workers, gain in self.estimates.items()]
            yield f"estimate    {', '.join(gains)} as fast as one, each on a device or processor of its own"
        if self.memory:
            yield f"memory      up to {self.memory / 2**20:.0f} MiB in a worker"

    @property
    def estimates(self) -> dict[int, float]:
        """How many times as fast as one worker others would be; empty if that was not measured."""
        alone, more = self.measured.get(1), self.measured.get(_MORE_WORKERS)
        if alone is None or more is None or not alone.compute_seconds:
            return {}
        return speedups(alone.compute_seconds, more.exchange_seconds, num_shards=self.num_shards)

    def as_json(self) -> dict[str, Any]:
        """Return the page as plain values."""
        return {
            "script": str(self.script),
            "training": self.training,
            "iterations": self.iterations,
            "workers": [{"iteration": iteration, "workers": workers} for iteration, workers in self.sizes],
            "iteration_seconds": {
                str(workers): {"compute": each.compute_seconds, "exchange": each.exchange_seconds}
                for workers, each in sorted(self.measured.items())
            },
            "speedups": {str(workers): gain for workers, gain in self.estimates.items()},
            "memory": self.memory or None,
            "findings": self.findings,
            "bits": self.bits or None,
            "error": self.error or None,
        }


def speedups(compute_seconds: float, exchange_seconds: float, *, num_shards: int) -> dict[int, float]:
    """Return how many times as fast as one worker others are: a worker computes whole shards, and all exchange.

    ``compute_seconds`` are those of all shards. More workers than shards compute nothing.
    """
    shard = compute_seconds / num_shards

    def seconds(workers: int) -> float:
        return -(-num_shards // workers) * shard + exchange_seconds

    sizes = sorted({size for size in (2, 4, 8, 16) if size < num_shards} | {num_shards})
    return {workers: compute_seconds / seconds(workers) for workers in sizes if workers > 1}


def try_script(
    script: Path, args: Sequence[str], *, iterations: int, env: Mapping[str, str], requirements: tuple[str, ...]
) -> Report:
    """Run the first ``iterations`` of a script on this machine. Raises UsageError for what cannot run at all."""
    return asyncio.run(_try_script(script, tuple(args), iterations, dict(env), requirements))


async def _try_script(
    script: Path, args: tuple[str, ...], iterations: int, env: dict[str, str], requirements: tuple[str, ...]
) -> Report:
    from ..local.plan import parse_plan
    from ..local.settings import RunSettings

    plan = parse_plan(f"0:1,{iterations // 3}:{_MORE_WORKERS},{2 * iterations // 3}:1")
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
                report.training, report.bits, report.num_shards = training_call(ready), ready.bits, ready.num_shards
            case Rescaled(iteration=iteration, after=after):
                report.sizes.append((iteration, after))
            case Noted(text=text) if not text.startswith("step "):  # of the plan, after the end of training
                report.findings.append(text)
            case Progressed(progress=progress):
                report.iterations = progress.iteration
                report.memory = max(report.memory, _peak_memory())
                if progress.measurement:
                    report.measured[progress.measurement.workers] = progress.measurement
                if progress.iteration >= self._iterations and not self._is_stopping:
                    self._is_stopping = True
                    self._local.stop()
            case _:
                pass


def _peak_memory() -> int:
    """The most memory that a worker of this process has had so far, in bytes."""
    from ..pool.worker_processes import workers_below

    return max((_peak_of(worker.pid) for worker in workers_below(os.getpid(), "")), default=0)


def _peak_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(peaks[0]) if peaks else 0
