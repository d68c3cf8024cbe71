"""A job of many workers on one machine changes and recovers as a small one does."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import TRAIN
from .running import Outcome, command
from .test_kills import workers

NUM_WORKERS = 64


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sixty_four_workers_shrink_grow_and_lose_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("batch_size=48", f"batch_size={NUM_WORKERS}"))
    process = subprocess.Popen(
        command(
            script,
            "--plan",
            f"0:{NUM_WORKERS},6:40,12:{NUM_WORKERS}",
            home=tmp_path / "home",
            args=("--shards", str(NUM_WORKERS), "--epochs", "6", "--pause", "0.05"),
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
            if f"40 -> {NUM_WORKERS} workers" in line:
                os.kill(workers(process.pid)[NUM_WORKERS // 2], 9)
                has_killed = True
        out = process.stdout.read()
        outcome = Outcome(process.wait(60), json.loads(out) if out.strip() else {}, "")
    finally:
        process.kill()
        process.communicate()
    assert has_killed
    outcome.assert_every_sample_once(epochs=6)
    assert [size for _, size in outcome.sizes][:4] == [NUM_WORKERS, 40, NUM_WORKERS, NUM_WORKERS - 1]
