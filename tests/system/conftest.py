"""Real runs of the real command."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from resile_testing.waiting import PATIENCE_SECONDS

from .trials import trial_script, trial_sha

__all__ = ["trial_script", "trial_sha"]

TRAIN = """
import argparse, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import Callback, ElasticModel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--shards", type=int, default=None)
parser.add_argument("--every", type=int, default=None)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--readers", type=int, default=0)
options = parser.parse_args()

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(480, 16, generator=generator)
targets = (inputs[:, 0] * inputs[:, 1] > 0).long()

class Pause(Callback):
    def on_iteration(self, loop, iteration):
        if iteration.number == 0:
            print("first iteration", flush=True)
        time.sleep(options.pause)

def datasets():
    return TensorDataset(inputs, targets), None

print("script starts")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
result = ElasticModel(
    model, datasets, nn.CrossEntropyLoss(), optimizer, callbacks=[Pause()], num_workers=options.readers
).train(epochs=options.epochs, batch_size=48, num_shards=options.shards, checkpoint_every=options.every)
print("sha", result.params_sha256)
"""
ITERATIONS_PER_EPOCH = 10


@dataclass
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def last_error(self) -> str:
        return self.err.splitlines()[-1] if self.err else ""


@dataclass
class Resile:
    """The command, with a home and a folder for temporary files of its own."""

    folder: Path
    temporary: Path
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def script(self, text: str = TRAIN, name: str = "train.py") -> Path:
        file = self.folder / name
        file.write_text(text)
        return file

    def start(self, *arguments: object, output: int = subprocess.PIPE, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "resile", *map(str, arguments)],
            stdout=output,
            stderr=output,
            text=True,
            cwd=self.folder,
            env={**os.environ, "RESILE_HOME": str(self.home), "TMPDIR": str(self.temporary), **environment},
        )
        self.started.append(process)
        return process

    def run(self, *arguments: object, **environment: str) -> Ended:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=240)
        return Ended(process.returncode, out, err)

    def finish(self, process: "subprocess.Popen[str]") -> Ended:
        out, err = process.communicate(timeout=240)
        return Ended(process.returncode, out, err)


@pytest.fixture
def resile(tmp_path: Path) -> Iterator[Resile]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as temporary:  # short: sockets are bound in it
        command = Resile(tmp_path, Path(temporary))
        yield command
        for process in command.started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait for something that another process brings about."""

    def wait(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 that `TRAIN` gives in a plain process, without Resile's launcher."""
    script = tmp_path_factory.mktemp("plain") / "train.py"
    script.write_text(TRAIN)
    out = subprocess.check_output([sys.executable, str(script)], text=True)
    return out.split("sha ")[1].strip()
