"""A pool under random attacks keeps all its promises."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).with_name("scripts") / "attacked.py"
SEED = 11


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:  # short: sockets are bound in it
        yield Path(folder)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_pool_under_random_attacks_keeps_its_promises(temporary: Path) -> None:
    command = ["chaos", "campaign", "--own-pool", str(SCRIPT), "--seed", str(SEED), "--minutes", "1.5", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "resile", *command, "--", "--epochs", "80"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        out, err = process.communicate(timeout=500)
    finally:
        if process.poll() is None:  # so that it can take its pool with it
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    found = json.loads(out)
    assert found["faults"] == [], err
    assert process.returncode == 0
    assert len(found["attacks"]) >= 8
    assert found["jobs"]
    assert not list(temporary.iterdir()), "the pool is gone with all it had"
    assert not psutil.Process().children()
