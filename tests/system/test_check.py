"""`resile check`: whether a script trains elastically, by a few of its iterations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training


class Centered(nn.Linear):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs - outputs.mean(0)


resile.training.seed()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(2400, 8), torch.arange(2400) % 2), batch_size=24)
model, optimizer, loader = resile.training.prepare(model, optimizer, data, num_shards=6)
for _ in loader.epochs(100):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
"""


def check(script: Path, text: str) -> tuple[int, dict[str, Any]]:
    """Check a script; return the exit status and the report."""
    script.write_text(text)
    command = [sys.executable, "-m", "resile", "check", str(script), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def test_a_script_that_trains_is_tried_on_changing_numbers_of_workers(tmp_path: Path) -> None:
    status, report = check(tmp_path / "train.py", SCRIPT)
    assert (status, report["findings"], report["error"]) == (0, [], None)
    assert [each["workers"] for each in report["workers"]] == [1, 3, 1]
    assert 12 <= report["iterations"] < 10_000
    assert report["training"].startswith("10000 iterations: 100 epochs of 2400 samples")
    assert report["bits"] == "same bits"


def test_what_a_run_warns_of_is_a_finding(tmp_path: Path) -> None:
    status, report = check(tmp_path / "train.py", SCRIPT.replace("nn.Linear(8, 2)", "Centered(8, 2)"))
    assert status == 3
    assert "depends on the other samples of its batch" in report["findings"][0]


def test_a_script_that_cannot_train_fails(tmp_path: Path) -> None:
    status, report = check(tmp_path / "train.py", "print('no training call')")
    assert status == 1
    assert "without a training call" in report["error"]
