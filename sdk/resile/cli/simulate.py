"""The command that tries policies against a workload, with the scheduler's own core in simulated time."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError
from resile_shared.policies import POLICIES_HELP, PolicyName

from .options import AsJson, show

if TYPE_CHECKING:
    from resile_scheduler.simulation.figures import Figures
    from resile_scheduler.simulation.outcome import JobOutcome, Outcome
    from resile_scheduler.simulation.simulate import OnProgress, Settings
    from resile_scheduler.simulation.workload import Workload

app = typer.Typer(rich_markup_mode=None)

REPORT_SECONDS = 5.0


@app.command(short_help="Try policies on a workload, in simulated time.")
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file, or a synthetic load: low, high or bursty. A file is the history of a pool, as `resile events "
            "--json` prints it, or a workload (.csv).",
        ),
    ],
    *,
    policy: Annotated[
        list[PolicyName] | None,
        typer.Option("--policy", metavar="NAME", help=f"{POLICIES_HELP}. May be repeated. Default: all."),
    ] = None,
    preemption: Annotated[
        bool, typer.Option("--preemption/--no-preemption", help="Whether a job may lose slots to another one.")
    ] = True,
    slots: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Slots of the pool. Default: 40, or those of the history."),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Hosts that share the slots evenly. Default: one for 8 slots."),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Measured speeds of a workload's applications or models.", exists=True),
    ] = None,
    hours: Annotated[
        float,
        typer.Option(metavar="H", min=0.01, max=10_000, help="Hours during which jobs of a synthetic load arrive."),
    ] = 4.0,
    change_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.0,
            max=86_400,
            help="Training time that a job loses when its workers change. Default: 0.5, or what the history recorded.",
        ),
    ] = None,
    host_failures: Annotated[
        float | None,
        typer.Option(metavar="H", min=0.01, help="Mean hours until a host crashes; it is back 10 min later."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of a synthetic load, and of host crashes.")] = 0,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the slots of the jobs over time into this PNG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    r"""Try policies on a workload: the scheduler that runs a pool decides, in simulated time.

    \b
    resile simulate high --policy fairshare --policy priority      a synthetic load on 40 slots
    resile events --tail 10000 --json > history.json               the history of a pool ...
    resile simulate history.json --policy fifo --chart fifo.png    ... under another policy
    resile simulate jobs.csv --slots 64 --host-failures 24         a workload, on hosts that crash once a day

    For each policy, this shows completion times, fairness, utilization and changes. The same arguments always give
    the same figures. docs/scheduling.md describes the files, the figures, and what is simulated.
    """
    from resile_scheduler.simulation.sources import read_trace

    _check_chart(chart)
    workload = read_trace(trace, num_slots=slots, num_hosts=hosts, profiles=profiles, hours=hours, seed=seed)
    for job in workload.left_out:
        print(f"resile: {job} is left out: it has not trained long enough to measure its speed", file=sys.stderr)
    tried = dict.fromkeys(policy or PolicyName)
    settings = [
        _settings(workload, name, preemption, change_seconds, host_failures=host_failures, seed=seed) for name in tried
    ]
    outcomes = [_simulate(workload, each) for each in settings]
    if chart is not None:
        from .simulate_chart import draw

        draw(outcomes, file=chart)
    _show(trace, outcomes, chart, as_json=as_json)


def _settings(
    workload: "Workload",
    policy: PolicyName,
    preemption: bool,
    change_seconds: float | None,
    *,
    host_failures: float | None,
    seed: int,
) -> "Settings":
    from resile_scheduler.simulation.simulate import Failures, Settings, delays_of

    failures = Failures(host_failures) if host_failures else None
    return Settings(policy, preemption, delays_of(workload, change_seconds), failures, seed)


def _simulate(workload: "Workload", settings: "Settings") -> "Outcome":
    from resile_scheduler.simulation.simulate import simulate

    return simulate(workload, settings, on_progress=_progress(settings.name, len(workload.submissions)))


def _progress(policy: str, num_jobs: int) -> "OnProgress":
    """Return a function that says now and then on stderr how far a long simulation has come."""
    reported = time.monotonic()

    def on_progress(num_ended: int, seconds: float) -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            hours = f"{seconds / 3600:.1f} simulated hours"
            print(f"{policy}: {num_ended} of {num_jobs} jobs have ended, {hours}", file=sys.stderr, flush=True)

    return on_progress


def _show(trace: str, outcomes: Sequence["Outcome"], chart: Path | None, *, as_json: bool) -> None:
    from resile_scheduler.simulation.figures import figures_of

    figures = [figures_of(outcome) for outcome in outcomes]
    document = {
        "trace": trace,
        "slots": outcomes[0].num_slots,
        "chart": str(chart) if chart else None,
        "policies": [
            {**vars(figure), "history": [_job(job) for job in outcome.jobs]}
            for figure, outcome in zip(figures, outcomes, strict=True)
        ],
    }
    from .tables import count

    lines = [
        f"{trace}: {count(figures[0].jobs, 'job')} on {count(outcomes[0].num_slots, 'slot')}",
        "",
        *_table(figures),
    ]
    show(document, [*lines, *([f"chart: {chart}"] if chart else [])], as_json=as_json)


def _job(job: "JobOutcome") -> dict[str, object]:
    submission = job.submission
    return {
        "id": submission.job,
        "name": submission.spec.name,
        "state": job.state.value,
        "submitted": submission.time,
        "deadline": submission.deadline,
        "started": job.started,
        "ended": job.ended,
        "changes": job.num_changes,
        "workers": job.steps,
    }


_ROWS: dict[str, Callable[["Figures"], str]] = {
    "completed": lambda f: str(f.completed),
    "dropped": lambda f: str(f.dropped),
    "deadlines met": lambda f: f"{f.deadlines_met} of {f.deadlines}" if f.deadlines else "-",
    "completion time, mean": lambda f: _clock(f.mean_seconds),
    "median": lambda f: _clock(f.median_seconds),
    "99th percentile": lambda f: _clock(f.p99_seconds),
    "wait, mean": lambda f: _clock(f.mean_wait_seconds),
    "makespan": lambda f: _clock(f.makespan_seconds),
    "utilization": lambda f: f"{f.utilization:.1%}",
    "fairness (Jain)": lambda f: _number(f.jain),
    "finish-time fairness, median": lambda f: _number(f.fairness_median),
    "worst": lambda f: _number(f.fairness_worst),
    "changes per job": lambda f: f"{f.changes / f.jobs:.1f}",
}


def _table(figures: Sequence["Figures"]) -> Iterator[str]:
    from .tables import columns

    rows = [(label, *(cell(figure) for figure in figures)) for label, cell in _ROWS.items()]
    return columns(("", *(figure.policy for figure in figures)), rows)


def _clock(seconds: float | None) -> str:
    from .tables import clock

    return "-" if seconds is None else clock(seconds)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _check_chart(chart: Path | None) -> None:
    if chart is None:
        return
    if chart.suffix != ".png":
        raise UsageError(f"--chart {chart}: the picture is a PNG, so its name must end with .png")
    if not chart.parent.is_dir() or not os.access(chart if chart.exists() else chart.parent, os.W_OK):
        raise UsageError(f"--chart {chart} is not writable: choose another file")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--chart needs matplotlib: install with `{sys.executable} -m pip install matplotlib`")
