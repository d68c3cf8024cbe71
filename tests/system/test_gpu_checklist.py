"""The checklist for GPUs runs on a CPU too: what it checks works, and what a CPU cannot show is named."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_dry_run_of_the_checklist_passes_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "tests.gpu.checklist", "--dry-run", "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    text = report.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it says nothing about GPUs" in text
    assert "| distinct GPUs | skipped |" in text
    assert "| iteration against DDP on NCCL | skipped |" in text
    simulated = "passed" if find_spec("torch_openreg") else "skipped"
    assert f"| hooks on the thread of PyTorch's simulated device | {simulated} |" in text
    assert "over TCP" not in text
