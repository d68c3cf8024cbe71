"""What happens to a job leaves the same history under `resile run` as on a pool: same form, same words, one decider."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resile.pool.worker_processes import workers_below

from .conftest import TRAIN, Resile
from .pools import UpPool, pool_up
from .test_run import read_until

pytestmark = pytest.mark.long

SLOTS = 3
FAULTY = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import ElasticModel

def loss(outputs, targets):
    raise ValueError("bad loss")

torch.manual_seed(0)
model = nn.Linear(4, 2)
data = TensorDataset(torch.zeros(96, 4), torch.zeros(96, dtype=torch.long))
ElasticModel(model, lambda: (data, None), loss, torch.optim.SGD(model.parameters(), lr=0.1)).train(batch_size=48)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    with pool_up(tmp_path_factory.mktemp("pool") / "home", "--hosts", 1, "--slots", SLOTS) as pool:
        yield pool


FIELDS = {"number", "time", "kind", "generation", "workers", "slots", "iteration", "reason"}


def told(history: list[dict[str, Any]], host: str) -> list[tuple[str, int, str]]:
    """Kind, workers and reason of each item, with the host's name taken out."""
    assert [item["number"] for item in history] == list(range(1, len(history) + 1))
    for item in history:
        assert set(item) - {"loss"} == FIELDS
        assert "loss" not in item or item["loss"]["reason"] in item["reason"], "what was lost is in a field too"
    return [(item["kind"], item["workers"], item["reason"].replace(f"{host}/", "HOST/")) for item in history]


def strike(launcher: int, number: signal.Signals) -> None:
    """Send a signal to worker 1, wherever below ``launcher`` it runs."""
    (victim,) = [worker.pid for worker in workers_below(launcher, "") if worker.number == 1]
    os.kill(victim, number)


def on_pool(pool: UpPool, script: Path, *, number: signal.Signals | None, args: tuple[str, ...]) -> list[Any]:
    job = pool.submit(script, "--max-workers", SLOTS, "--", *args)
    if number is not None:
        pool.becomes(job, lambda job: job["workers"] == SLOTS and job["iteration"] > 0)
        strike(pool.process.pid, number)
    pool.run("wait", job)
    return told(pool.ask("job", job)["history"], "host-1")


def in_a_local_run(resile: Resile, script: Path, *, number: signal.Signals | None, args: tuple[str, ...]) -> list[Any]:
    process = resile.start("run", script, "-w", SLOTS, "--json", "--", *args)
    if number is not None:
        read_until(process.stderr, "first iteration")
        strike(process.pid, number)
    return told(resile.finish(process).json["history"], "local")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(None, marks=pytest.mark.nightly, id="undisturbed"),
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly, id="frozen"),
    ],
)
def test_a_job_that_completes(number: signal.Signals | None, pool: UpPool, resile: Resile, tmp_path: Path) -> None:
    script = resile.script(TRAIN)
    args = ("--pause", "0.2") if number else ()
    local = in_a_local_run(resile, script, number=number, args=args)
    pooled = on_pool(pool, script, number=number, args=args)
    assert [item[:2] for item in local] == [item[:2] for item in pooled]
    assert local[:3] == pooled[:3], "up to the recovery the reasons are the same too"
    assert local[-1] == pooled[-1] == ("completed", SLOTS, "")


def test_a_script_that_raises(pool: UpPool, resile: Resile) -> None:
    script = resile.script(FAULTY)
    local = in_a_local_run(resile, script, number=None, args=())
    pooled = on_pool(pool, script, number=None, args=())
    for history in (local, pooled):  # the first error is tolerated, so a recovery may begin before the next is known
        assert list(dict.fromkeys(item[0] for item in history)) == ["accepted", "allocation", "failed"]
    assert "ValueError: bad loss" in local[-1][2]
    assert "ValueError: bad loss" in pooled[-1][2]


def test_a_pause_is_what_ctrl_c_is(pool: UpPool, resile: Resile) -> None:
    script = resile.script(TRAIN)
    args = ("--pause", "0.2")
    process = resile.start("run", script, "-w", SLOTS, "--json", "--", *args)
    read_until(process.stderr, "first iteration")
    process.send_signal(signal.SIGINT)
    local = told(resile.finish(process).json["history"], "local")
    resumed = told(resile.run("run", script, "--resume", "-w", SLOTS, "--json", "--", *args).json["history"], "local")
    job = pool.submit(script, "--max-workers", SLOTS, "--", *args)
    pool.becomes(job, lambda job: job["workers"] == SLOTS and job["iteration"] > 0)
    assert pool.run("pause", job).status == 0
    pool.becomes(job, lambda job: job["state"] == "paused")
    assert pool.run("resume", job).status == 0
    pool.run("wait", job)
    pooled = told(pool.ask("job", job)["history"], "host-1")
    assert local == [*pooled[:4], ("stopped", 0, "requested")]
    assert [item for item in resumed if item[0] != "stopped"] == pooled
