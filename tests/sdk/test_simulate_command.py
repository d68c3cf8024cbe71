"""`resile simulate`: tables, JSON and pictures of workloads under policies, and mistakes in one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resile.cli import main

JOBS = "name,time,iterations,shard_seconds,max_workers,priority\na,0,2000,0.01,8,5000\nb,10,3000,0.01,8,10000\n"


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS)
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_policies_are_shown_side_by_side(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", jobs, "--slots", "8", "--policy", "fairshare", "--policy", "fifo"]) == 0
    title, _, heading, *rows = capsys.readouterr().out.splitlines()
    assert title == f"{jobs}: 2 jobs on 8 slots"
    assert heading.split() == ["fairshare", "fifo"]
    cells = {row.split("  ")[0]: row.split()[-2:] for row in rows}
    assert cells["completed"] == ["2", "2"]
    assert cells["changes per job"] == ["1.0", "0.0"]
    assert list(cells) == [
        *("completed", "dropped", "deadlines met", "completion time, mean", "median", "99th percentile", "wait, mean"),
        *("makespan", "utilization", "fairness (Jain)", "finish-time fairness, median", "worst", "changes per job"),
    ]


def test_json_has_the_figures_and_the_workers_of_each_job(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Priorities 1 : 2 on eight slots, but for the moments in which workers start: 8, then 3 and 5, then 8."""
    document = simulated(capsys, jobs, "--slots", "8", "--policy", "fairshare")
    (fairshare,) = document["policies"]
    assert (document["slots"], fairshare["policy"], fairshare["completed"]) == (8, "fairshare", 2)
    assert {job["name"]: [workers for _, workers in job["workers"]] for job in fairshare["history"]} == {
        "a": [8, 3, 0],
        "b": [5, 8, 0],
    }


def test_without_a_policy_all_are_tried(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [figures["policy"] for figures in simulated(capsys, jobs, "--no-preemption")["policies"]]
    assert names[:3] == ["fairshare, no preemption", "fifo, no preemption", "priority, no preemption"]


def test_the_same_arguments_give_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("low", "--slots", "8", "--hours", "1", "--host-failures", "1", "--policy", "fairshare")
    first = simulated(capsys, *arguments)
    assert first == simulated(capsys, *arguments)
    assert first != simulated(capsys, *arguments, "--seed", "1")


def test_a_picture_is_drawn(jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "chart.png"
    document = simulated(capsys, jobs, "--slots", "8", "--chart", str(chart))
    assert document["chart"] == str(chart)
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["nothing.csv"], "no trace nothing.csv: name a history (JSON), a workload (.csv), or low, high, bursty"),
        (["low", "--policy", "chaos"], "Invalid value for '--policy': 'chaos' is not one of 'fairshare', "),
        (["low", "--slots", "0"], "Invalid value for '--slots': must be greater than or equal to 1"),
        (["low", "--slots", "2", "--hosts", "3"], "2 slots on 3 hosts: every host needs at least one slot"),
        (["low", "--chart", "chart.svg"], "--chart chart.svg: the picture is a PNG, so its name must end with .png"),
        (["low", "--chart", "nowhere/chart.png"], "--chart nowhere/chart.png is not writable: choose another file"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("resile: ")
    assert line.count("\n") == 1
    assert fault in line


def test_a_malformed_trace_is_named_by_line_and_column(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(jobs).write_text(JOBS.replace("2000", "many"))
    assert main(["simulate", jobs, "--json"]) == 2
    fault = f"{jobs}, line 2, column iterations: 'many' is not a whole number of iterations"
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": fault}
    assert err == f"resile: {fault}\n"


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ("min_worker", "column min_worker: this column is unknown: is it min_workers?"),
        ("priority", "column priority: the header has this column more than once"),
    ],
)
def test_a_column_that_would_be_ignored_is_named(
    jobs: str, header: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names, *rows = JOBS.splitlines()
    Path(jobs).write_text("\n".join([f"{names},{header}", *(f"{row},5" for row in rows)]) + "\n")
    assert main(["simulate", jobs]) == 2
    assert capsys.readouterr().err == f"resile: {jobs}, line 1, {fault}\n"


def test_a_simulation_does_not_load_torch(jobs: str) -> None:
    code = f"import sys; from resile.cli import main; main(['simulate', {jobs!r}]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
