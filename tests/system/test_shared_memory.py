"""Workers that exchange their gradients in shared memory: grown, killed, frozen and shrunk, with the same bits."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .paced import CALLBACK, Pace
from .running import Outcome, command, plain
from .test_kills import workers

PATIENCE_SECONDS = 120
EPOCHS = 30
SCRIPT = f"""
import argparse
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import ElasticModel, seed
{CALLBACK}
parser = argparse.ArgumentParser()
parser.add_argument("--pace")
args = parser.parse_args()
seed(0)
inputs = torch.randn(240, 16)
targets = (inputs[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(16, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
ElasticModel(
    model, lambda: (TensorDataset(inputs, targets), None), nn.CrossEntropyLoss(), optimizer, callbacks=[Pace(args.pace)]
).train(epochs={EPOCHS}, batch_size=24, num_shards=6, checkpoint_every=100)
"""
"""Its one bucket has 2.6 MB: enough for shared memory."""


def wait_for_memory(pids: list[int]) -> None:
    """Wait until each of these workers has mapped its own segment and that of each other."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for pid in pids:
        while Path(f"/proc/{pid}/maps").read_text().count("memfd:resile") < len(pids):
            assert time.monotonic() < deadline, "the workers do not share memory"
            time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_workers_that_share_memory_may_grow_die_freeze_and_shrink(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    pace = Pace(tmp_path / "pace")
    process = subprocess.Popen(
        command(script, "--plan", "0:2,3:3,295:2", home=tmp_path / "home", args=("--pace", str(pace.file))),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    strikes = [(0, signal.SIGKILL), (-1, signal.SIGSTOP), (1, signal.SIGKILL)]
    try:
        for line in process.stderr:
            if strikes and re.search("-> 3 workers", line):
                pids = workers(process.pid)
                wait_for_memory(pids)
                rank, strike = strikes.pop(0)
                os.kill(pids[rank], strike)
                if not strikes:
                    pace.fast_until(10**6)
        out = process.stdout.read()
        outcome = Outcome(process.wait(PATIENCE_SECONDS), json.loads(out) if out.strip() else {}, "")
    finally:
        process.kill()
        process.communicate()
    assert not strikes
    assert outcome.sizes[-1][1] == 2
    assert outcome.sha == plain(script)
    outcome.assert_every_sample_once(epochs=EPOCHS)
