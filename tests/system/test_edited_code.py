"""A run keeps the code that it began with, whatever is edited meanwhile, and a resume says what has changed."""

import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from resile.pool.worker_processes import workers_below

SCRIPT = """
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import resile.training
from parts.model import Model

FOLDER = Path(__file__).parent
scale = float((FOLDER / "data" / "scale.txt").read_text())
rate = float(sys.argv[1]) if len(sys.argv) > 1 else 0.01
resile.training.seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
loader = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=12)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader, checkpoint_every=4, num_shards=4)
for epoch in loader.epochs(3):
    for (inputs,) in loader:
        from more.late import factor  # a joiner reaches this line when it has joined

        optimizer.zero_grad()
        (factor * scale * model(inputs).pow(2).mean()).backward()
        optimizer.step()
        if loader.is_lowest_rank and loader.iteration == 6:
            print("half", flush=True)
            while not Path("go").exists():
                time.sleep(0.01)
        time.sleep(0.02)
"""
MODEL = """
import torch


class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
"""


@pytest.fixture
def project(resile: Any) -> Path:
    folder: Path = resile.folder / "project"
    files = {
        "pyproject.toml": "",
        "scripts/train.py": f"import sys\nsys.path.insert(0, {str(folder)!r})\n{SCRIPT}",
        "scripts/data/scale.txt": "1.5",
        "parts/__init__.py": "",
        "parts/model.py": MODEL,
        "more/late.py": "factor = 1.0",
        "other.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def edit(project: Path) -> None:
    """Change and remove what a run of the project has begun with."""
    script = project / "scripts" / "train.py"
    script.write_text(f"# longer\n{script.read_text().replace('0.01', '0.5')}")
    (project / "parts" / "model.py").write_text(MODEL.replace("4, 1", "4, 2"))
    shutil.rmtree(project / "more")
    (project / "other.py").write_text("raise ValueError('nobody imports this')")


@pytest.fixture
def sha(resile: Any, project: Path) -> str:
    """The bits of the project as it is, in one undisturbed run."""
    (resile.folder / "go").touch()
    ended = resile.run("run", project / "scripts" / "train.py", "-w", 1, "--json")
    (resile.folder / "go").unlink()
    assert ended.status == 0, ended.err
    return str(ended.json["params_sha256"])


def started(resile: Any, project: Path, *options: object) -> Any:
    """Start a run; return when it waits half way."""
    process = resile.start("run", project / "scripts" / "train.py", "--json", *options)
    for line in process.stderr:
        if "half" in line:
            return process
    raise AssertionError("it ended before")


def test_workers_that_start_later_run_the_code_that_the_run_began_with(resile: Any, project: Path, sha: str) -> None:
    process = started(resile, project, "--plan", "0:1,9:3")
    edit(project)
    (resile.folder / "go").touch()
    ended = resile.finish(process)
    assert ended.status == 0, ended.err
    assert (ended.json["params_sha256"], ended.json["bits"]) == (sha, "same bits")
    assert ended.json["workers"] == 3


def test_a_run_whose_processes_are_all_killed_begins_again_with_the_code_that_it_had(
    resile: Any, project: Path, sha: str
) -> None:
    process = started(resile, project, "-w", 2)
    edit(project)
    (resile.folder / "go").touch()
    fork_server = psutil.Process(next(iter(workers_below(process.pid, ""))).pid).parent()
    assert fork_server is not None
    fork_server.send_signal(signal.SIGKILL)
    ended = resile.finish(process)
    assert ended.status == 0, ended.err
    assert (ended.json["params_sha256"], ended.json["bits"]) == (sha, "same bits")


def test_a_traceback_shows_the_code_that_ran(resile: Any, project: Path) -> None:
    late = project / "more" / "late.py"
    late.write_text("import os\nfactor = 1.0\nif os.path.exists('go'):\n    raise ValueError('as it began')\n")
    process = started(resile, project, "--plan", "0:1,9:2")
    late.write_text("one\ntwo\nthree\nfour\n")
    (resile.folder / "go").touch()
    ended = resile.finish(process)
    assert f"File \"{late}\", line 4, in <module>\n    raise ValueError('as it began')" in ended.err
    assert "ValueError: as it began (../more/late.py, line 4)" in ended.err
    assert "code_copy.py" not in ended.err


@pytest.fixture
def stopped(resile: Any, project: Path, sha: str) -> str:
    """The id of a run that was stopped half way."""
    process = started(resile, project, "-w", 2)
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if "saving a checkpoint" in line:
            break
    (resile.folder / "go").touch()
    ended = resile.finish(process)
    assert ended.status == 130, ended.err
    return str(ended.json["id"])


def test_a_resume_with_changed_code_or_arguments_names_them_and_asks(
    resile: Any, project: Path, sha: str, stopped: str
) -> None:
    script = project / "scripts" / "train.py"
    kept = script.read_text()
    edit(project)
    refused = resile.run("run", script, "--resume", stopped, "-w", 2)
    assert refused.status == 2
    assert "changed since then: more/late.py, parts/model.py, scripts/train.py. Add `--code old`" in refused.last_error
    assert "other.py" not in refused.err

    old = resile.run("run", script, "--resume", stopped, "-w", 2, "--code", "old", "--json")
    assert old.status == 0, old.err
    assert (old.json["params_sha256"], old.json["bits"]) == (sha, "same bits")

    script.write_text(kept)
    arguments = resile.run("run", script, "--resume", stopped, "-w", 2, "--", "0.02")
    assert arguments.status == 2
    assert "arguments (none)" in arguments.last_error


def test_a_run_that_resumes_with_new_code_says_that_its_bits_are_others(
    resile: Any, project: Path, sha: str, stopped: str
) -> None:
    (project / "more" / "late.py").write_text("factor = 2.0")
    script = project / "scripts" / "train.py"
    new = resile.run("run", script, "--resume", stopped, "-w", 2, "--code", "new", "--json")
    assert new.status == 0, new.err
    assert new.json["params_sha256"] != sha
    assert new.json["bits"] == "bits not guaranteed: changed more/late.py"
    again = resile.run("run", script, "--resume", stopped, "-w", 1, "--json")
    assert again.json["bits"] == "bits not guaranteed: changed more/late.py"


def test_a_resume_with_another_model_or_optimizer_says_what_differs(resile: Any, project: Path, stopped: str) -> None:
    script = project / "scripts" / "train.py"
    kept = script.read_text()
    script.write_text(kept.replace("optim.SGD", "optim.AdamW"))
    optimizer = resile.run("run", script, "--resume", stopped, "-w", 2, "--code", "new")
    assert optimizer.status == 1
    assert "another optimizer" in optimizer.last_error
    script.write_text(kept)
    (project / "parts" / "model.py").write_text(MODEL.replace("4, 1", "4, 2"))
    model = resile.run("run", script, "--resume", stopped, "-w", 2, "--code", "new")
    assert model.status == 1
    assert "weight has shape [2, 4] and torch.float32, instead of [1, 4] and torch.float32" in model.last_error
    assert "KeyError" not in optimizer.err + model.err
