"""Every benchmark runs: each is tried in its tiny form, whose numbers mean nothing; and no event costs too much."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
RESULT_LINES = {
    "checkpoint.py": (r"snapshot +[\d.]+ ", r"file +\d+ ", r"s3 +\d+ ", r"- +upload to s3"),
    "decisions.py": (r"a host is lost +[\d.]+ ", r"- +the slowest kind of event"),
    "exchange.py": (r" 2 +0\.01 +[\d.]+ ", r"state of 4 MB: [\d.]+ GB/s", r"Targets \(not checked in a tiny run\)"),
    "page.py": (r"items that the page received +75 of 75", r"memory of the monitor, most +\d+ MiB"),
    "policies.py": (r"4, balanced, bursty, most +[\d.]+ ± 0\.00 ", r"4, compute-bound, low, least +[\d.]+ "),
    "pollux.py": (r"Tiresias, ticks of 60 s, 30 s a change", r"made-up +\d+ ", r"mean +\d+ "),
    "pool.py": (r"shrink +1 ", r"new membership formed +[\d.]+ ", r"a job alone on a pool +[\d.]+ "),
    "recovery.py": (r"a worker of a pool, killed +1 ", r"a worker of `resile run`, killed +1 ", r"left out"),
    "registry.py": (r"until all have joined +[\d.]+ s", r"- +hosts lost by mistake: 0\.00"),
    "rescale.py": (r"shrink 4 to 3 +1 ", r"grow 3 to 4 +1 ", r"- +1 M, pause of a grow"),
    "second_job.py": (
        r"first job with its variables +[\d.]+ ",
        r"second job +[\d.]+ ",
        r"- +scikit-learn: command to effect of a growth",
        r"- +transformers: command to effect of a growth",
    ),
    "shards.py": (r"1 +[\d.]+ ", r"8 +[\d.]+ ", r"- +linear by the speed of 8 workers"),
    "simulate.py": (r"4, bursty, elastic-batch +1 ", r"- +4 slots, load low: seconds for 100,000 jobs"),
    "solver.py": (
        r"10 x 40, mixed +[\d.]+ ",
        r"20 x 80, policy elastic-batch +[\d.]+ ",
        r"difference from the optimum",
    ),
    "startup.py": (r"resile run, 2 workers +[\d.]+ ", r"- +resile run, times the plain script"),
    "tracing.py": (r"steady +[\d.]+ ", r"changing +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+\n"),
    "steady.py": (r"DDP \(gloo\) +[\d.]+ ", r"Resile, default V +[\d.]+ "),
}

REACH_INSIDE = ("steady.py", "recovery.py")
"""These replace methods of the product, so a change of it can break them: they run in CI."""


def run(script: str, option: str) -> str:
    done = subprocess.run([sys.executable, BENCH / script, option], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=pytest.mark.long if script in REACH_INSIDE else pytest.mark.nightly)
        for script in RESULT_LINES
    ],
)
def test_a_benchmark_prints_its_results(script: str) -> None:
    out = run(script, "--tiny")
    for line in RESULT_LINES[script]:
        assert re.search(line, out), out


def test_all_benchmarks_are_tried() -> None:
    assert {file.name for file in BENCH.glob("*.py") if "argument_parser(__doc__)" in file.read_text()} == {
        *RESULT_LINES,
        "costs.py",
    }


@pytest.mark.long
@pytest.mark.parametrize("script", [*RESULT_LINES, "recovered.py"])
def test_a_benchmark_can_be_imported(script: str) -> None:
    """And what it imports of peers."""
    assert f"usage: {script}" in run(script, "--help")


def costs(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCH / "costs.py", "--check", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_no_event_costs_more_than_is_allowed() -> None:
    done = costs()
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (r"shards computed +12 +12 ", r"system calls +\d+ ", r"stored allocations +\d+ "):
        assert re.search(line, done.stdout), done.stdout


@pytest.mark.long
def test_what_is_done_too_much_is_noticed() -> None:
    """A message in each iteration, a wait for the disk and a copy of the state at each change."""
    done = costs("--mutants", "message", "disk", "copy")
    assert done.returncode == 1, done.stdout + done.stderr
    for line in (
        r"an iteration of 4 workers: messages to agents 4, at most 0 are allowed",
        r"a shrink: waits for the disk [34], at most 0 are allowed",
        r"a shrink: copied bytes [\d.e+]+, at most 0 are allowed",
    ):
        assert re.search(line, done.stderr), done.stderr
