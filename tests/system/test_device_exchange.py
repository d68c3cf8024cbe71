"""Workers whose sums travel over process groups: rescaled, killed and frozen, with the bits of TCP and of a script."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from resile_learner.collectives.device.communicators import VARIABLE

from .paced import CALLBACK
from .running import plain, run
from .struck import run_struck

EPOCHS = 12
SCRIPT = f"""
import argparse
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import ElasticModel, seed
{CALLBACK}
parser = argparse.ArgumentParser()
parser.add_argument("--pace")
parser.add_argument("--broken", type=int, default=0)
args = parser.parse_args()
if args.broken:
    from resile_learner.collectives.device import communicators, process_group
    def no_group(*args, **options):
        raise RuntimeError("no route to the other devices")
    def fail(*args):
        raise RuntimeError("a device has failed")
    if args.broken == 1:
        communicators.connect = no_group
    else:
        connect = communicators.connect
        def connect_and_fail(*args, rank, **options):
            group = connect(*args, rank=rank, **options)
            group.gather = fail if rank == 1 else group.gather
            return group
        communicators.connect = connect_and_fail
seed(0)
inputs = torch.randn(240, 16)
targets = (inputs[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(16, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 100), nn.Linear(100, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
ElasticModel(
    model, lambda: (TensorDataset(inputs, targets), None), nn.CrossEntropyLoss(), optimizer, callbacks=[Pace(args.pace)]
).train(epochs={EPOCHS}, batch_size=24, num_shards=6, checkpoint_every=100)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "gloo")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def have_process_groups(pids: Sequence[int]) -> bool:
    """Whether each of these processes has a thread that gloo runs operations on."""
    tasks = [Path(f"/proc/{pid}/task").glob("*/comm") for pid in pids]
    return all(any("gloo" in path.read_text() for path in names) for names in tasks)


def test_a_rescaled_job_has_the_bits_of_tcp_and_of_the_plain_script(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_devices = run(script, "--plan", "0:1,20:3,70:2", home=tmp_path / "devices")
    assert "over TCP" not in on_devices.errors
    monkeypatch.delenv(VARIABLE)
    over_tcp = run(script, "--plan", "0:1,20:3,70:2", home=tmp_path / "tcp")
    assert on_devices.sizes == over_tcp.sizes == [(0, 1), (20, 3), (70, 2)]
    assert on_devices.sha == over_tcp.sha == plain(script)
    on_devices.assert_every_sample_once(epochs=EPOCHS)


@pytest.mark.parametrize(("broken", "reason"), [(1, "no route to the other devices"), (2, "a device has failed")])
def test_devices_that_cannot_connect_or_fail_are_named_and_cost_no_bits(
    script: Path, tmp_path: Path, broken: int, reason: str
) -> None:
    outcome = run(script, "--plan", "0:2,20:3", home=tmp_path / "home", args=("--broken", str(broken)))
    assert outcome.sha == plain(script)
    assert re.search(f"over TCP.*{reason}", outcome.errors), outcome.errors
    outcome.assert_every_sample_once(epochs=EPOCHS)


@pytest.mark.long
def test_workers_with_process_groups_may_grow_die_freeze_and_shrink(script: Path, tmp_path: Path) -> None:
    outcome = run_struck(script, tmp_path, leaves_at=115, are_linked=have_process_groups)
    assert "over TCP" not in outcome.errors
    assert outcome.sha == plain(script)
    outcome.assert_every_sample_once(epochs=EPOCHS)
