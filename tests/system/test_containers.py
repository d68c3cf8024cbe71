"""The real commands within the limits of a container: a quota of processors, and a small /dev/shm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resile_testing.control_groups import limited_group

from .pools import pool_up

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="control groups and mounts need root")


def test_a_pool_and_a_run_have_as_many_workers_as_their_quota_allows(tmp_path: Path, until: Any, resile: Any) -> None:
    with limited_group("cpu", 150_000) as inside:
        with pool_up(tmp_path / "pool", prefix=inside) as pool:
            until(lambda: pool.ask("hosts")["hosts"])
            (host,) = pool.ask("hosts")["hosts"]
        assert len(host["slots"]) == 1, host
        command = [*inside, sys.executable, "-m", "resile", "run", str(resile.script()), "--home", str(resile.home)]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    sizes = {item["workers"] for item in json.loads(done.stdout)["history"] if item["kind"] == "allocation"}
    assert sizes == {1}


READERS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from resile.training import prepare

class Large(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(3, 64, 64), index % 2

def collate(samples):  # in memory of its own: PyTorch's function uses shared memory at once
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
own = {"collate_fn": collate} if "own" in sys.argv else {}
loader = DataLoader(Large(), batch_size=48, num_workers=2, shuffle=True, **own)
model, optimizer, loader = prepare(model, optimizer, loader)
for epoch in loader.epochs(2):
    for images, labels in loader:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("collate", ["default", "own"])
def test_reading_processes_do_without_a_dev_shm_that_is_full(tmp_path: Path, resile: Any, collate: str) -> None:
    run = [sys.executable, "-m", "resile", "run", str(resile.script(READERS)), "--home", str(resile.home), "--json"]
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]

    def result(*prefix: str) -> Any:
        command = [*prefix, *run, "--workers", "2", "--", collate]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    full, roomy = result(*small), result()
    assert full["params_sha256"] == roomy["params_sha256"]
    (warning,) = (item["reason"] for item in full["history"] if item["kind"] == "warning")
    assert warning.startswith("/dev/shm has 1 MB and was full")
    assert "make it larger (docker run --shm-size=8g" in warning
    assert not [item for item in roomy["history"] if item["kind"] == "warning"]
