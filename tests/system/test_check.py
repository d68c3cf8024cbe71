"""`resile check`: whether a script trains elastically, by a few of its iterations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resile.cli.check import speedups

from .pools import pool_up

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
    assert set(report["iteration_seconds"]) <= {"1", "3"}
    assert 1 in map(int, report["iteration_seconds"])
    assert report["memory"] > 50 << 20, "a worker has torch in its memory"


def test_what_a_run_warns_of_is_a_finding(tmp_path: Path) -> None:
    status, report = check(tmp_path / "train.py", SCRIPT.replace("nn.Linear(8, 2)", "Centered(8, 2)"))
    assert status == 3
    assert "depends on the other samples of its batch" in report["findings"][0]


def test_a_script_that_cannot_train_fails(tmp_path: Path) -> None:
    status, report = check(tmp_path / "train.py", "print('no training call')")
    assert status == 1
    assert "without a training call" in report["error"]


def test_speedups_follow_from_whole_shards_and_the_exchange() -> None:
    assert speedups(8.0, 0.0, num_shards=8) == {2: 2.0, 4: 4.0, 8: 8.0}
    assert speedups(6.0, 1.0, num_shards=6) == {2: 6.0 / 4, 4: 6.0 / 3, 6: 3.0}, "4 workers compute as long as 3"
    assert speedups(1.0, 0.0, num_shards=1) == {}


def submit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resile", "submit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_script_that_cannot_train_is_not_submitted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit('no data: ' + sys.argv[1])")
    done = submit(script, "--check", "--home", tmp_path / "home", "--", "today")
    assert done.returncode == 2
    assert "no data: today" in done.stderr
    assert "not submitted: the script cannot train" in done.stderr.splitlines()[-1]
    assert done.stdout == ""


@pytest.mark.parametrize("option", [("--gang", "2"), ("--data", "mnist")])
def test_what_is_not_on_this_machine_is_not_tried(option: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = submit(tmp_path / "train.py", "--check", *option, "--home", tmp_path / "home")
    assert done.returncode == 2
    assert f"without {option[0]}" in done.stderr


@pytest.mark.long
def test_a_script_that_trains_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("loader.epochs(100)", "loader.epochs(3)"))
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 2) as pool:
        done = submit(tmp_path / "train.py", "--check", "--home", tmp_path / "home")
        assert "result      it trains on any number of workers" in done.stderr
        assert pool.run("wait", done.stdout.strip()).status == 0
