"""A pool under random attacks keeps all its promises."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).with_name("scripts") / "attacked.py"
SEED = 11
SMALL = ("--minutes", 0.2, "--hosts", 2, "--slots", 1, "--", "--epochs", 10)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:  # short: sockets are bound in it
        yield Path(folder)


@pytest.fixture
def start(temporary: Path) -> Iterator[Start]:
    """Start a campaign with a pool of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: object) -> "subprocess.Popen[str]":
        command = ["chaos", "campaign", "--own-pool", SCRIPT, "--seed", SEED, "--json", *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "resile", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:  # so that it can take its pool with it
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=90)


def assert_nothing_is_left(temporary: Path) -> None:
    assert not list(temporary.iterdir())
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SMALL, marks=pytest.mark.long, id="small"),
        pytest.param(("--minutes", 1.5), marks=pytest.mark.nightly, id="whole"),
    ],
)
def test_a_pool_under_random_attacks_keeps_its_promises(
    start: Start, temporary: Path, options: tuple[object, ...]
) -> None:
    process = start(*options)
    out, err = process.communicate(timeout=500)
    found = json.loads(out)
    assert found["faults"] == [], err
    assert found["members"], "the workers said what they committed"
    assert process.returncode == 0
    assert found["attacks"], err  # how many depends on how fast the machine recovers from each
    assert len(found["jobs"]) >= 2
    assert_nothing_is_left(temporary)


@pytest.mark.nightly
def test_requests_at_bad_moments_and_a_second_scheduler_keep_the_promises(start: Start, temporary: Path) -> None:
    only = ("pause job", "stop job", "priority job", "drain host", "duplicate scheduler")
    process = start("--minutes", 0.7, *(word for attack in only for word in ("--only", attack)))
    out, err = process.communicate(timeout=500)
    found = json.loads(out)
    assert found["faults"] == [], err
    assert found["attacks"], err
    assert not [each for each in found["skipped"] if " failed: " in each["reason"]], err
    assert_nothing_is_left(temporary)


@pytest.mark.nightly
def test_a_campaign_that_is_told_to_end_takes_its_pool_with_it(start: Start, temporary: Path) -> None:
    process = start("--minutes", 10)
    assert process.stderr is not None
    for line in process.stderr:
        if "#1 " in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + signal.SIGTERM, ""), err
    assert_nothing_is_left(temporary)
