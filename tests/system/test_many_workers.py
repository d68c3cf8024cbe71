"""A job of many workers on one machine changes and recovers as a small one does."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import TRAIN
from .running import Outcome, command
from .test_kills import workers

pytestmark = pytest.mark.long


@pytest.mark.nightly
@pytest.mark.parametrize("number", [16, pytest.param(64, marks=pytest.mark.nightly)])
def test_many_workers_shrink_grow_and_lose_one(number: int, tmp_path: Path) -> None:
    fewer = number * 5 // 8
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("batch_size=48", f"batch_size={number}"))
    process = subprocess.Popen(
        command(
            script,
            "--plan",
            f"0:{number},6:{fewer},12:{number}",
            home=tmp_path / "home",
            args=("--shards", str(number), "--epochs", "6", "--pause", "0.05"),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    has_killed = False
    try:
        for line in process.stderr:
            if f"{fewer} -> {number} workers" in line:
                os.kill(workers(process.pid)[number // 2], 9)
                has_killed = True
        out = process.stdout.read()
        outcome = Outcome(process.wait(60), json.loads(out) if out.strip() else {}, "")
    finally:
        process.kill()
        process.communicate()
    assert has_killed
    outcome.assert_every_sample_once(epochs=6)
    assert [size for _, size in outcome.sizes][:4] == [number, fewer, number, number - 1]
