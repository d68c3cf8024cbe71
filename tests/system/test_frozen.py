"""Workers and agents of a pool that are frozen: neither bits nor ledger change, and what was frozen comes back."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resile.chaos.attacks import Target, TargetKind
from resile.chaos.processes import PoolProcesses
from resile.chaos.second_scheduler import second_scheduler
from resile.client import AsyncClient, find_server
from resile_shared.http.api import JobView

from .conftest import TRAIN
from .paced import Pace, becomes, submit
from .pools import UpPool, pool_up
from .running import plain
from .test_pool_same_bits import SCRIPT


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[UpPool]:
    """Two hosts of two slots."""
    with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 2) as pool:
        yield pool


@pytest.mark.nightly
async def test_frozen_workers_and_agents_change_neither_bits_nor_ledger(pool: UpPool, tmp_path: Path) -> None:
    script = tmp_path / "code/measured.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    pace = Pace(tmp_path / "pace")
    processes = PoolProcesses(pool.process.pid)
    async with AsyncClient(find_server(home=pool.home)) as client:
        job = await submit(client, script, "--pace", pace.file, name="measured", max_workers=4)
        for number in (0, 2):
            await becomes(client, job, lambda view: view.workers == 4)
            (pid,) = processes.victims(Target(TargetKind.WORKER, f"{job}/{number}"))
            os.kill(pid, signal.SIGSTOP)
            await becomes(client, job, lambda view, number=number: told(view, f"worker {number} on"))
        for host in ("host-1", "host-2"):
            await becomes(client, job, lambda view: view.workers == 4)
            (agent,) = processes.victims(Target(TargetKind.AGENT, host))
            os.kill(agent, signal.SIGSTOP)
            await becomes(client, job, lambda view, host=host: told(view, f"{host} lost"))
            os.kill(agent, signal.SIGCONT)
        await becomes(client, job, lambda view: view.workers == 4)
        pace.fast_until(10**6)
    view = JobView.model_validate(pool.completed(job))
    assert view.params_sha256 == plain(script)
    for epoch in pool.ask("ledger", job)["epochs"]:
        assert (epoch["once"], epoch["more"], epoch["never"]) == (epoch["samples"], 0, 0)


def told(view: JobView, reason: str) -> bool:
    """Whether the job has lost somebody, and why."""
    return any(reason in item.reason and item.workers < 4 for item in view.history if item.kind == "allocation")


@pytest.mark.long
def test_a_scheduler_that_was_replaced_while_it_was_frozen_ends_when_it_continues(
    tmp_path: Path, undisturbed: str
) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(TRAIN)
    with pool_up(tmp_path / "home", "--slots", 2) as pool:
        job = pool.submit(script, "--", "--pause", 0.2)
        pool.becomes(job, lambda view: view["iteration"] > 2)
        first = pool.service("resile_scheduler")
        with second_scheduler(first.pid, pool.home):
            first.suspend()
            later = pool.submit(script)  # the second one accepts it
            assert pool.completed(later)["params_sha256"] == undisturbed
            first.resume()
        assert pool.completed(job)["params_sha256"] == undisturbed
        assert pool.completed(pool.submit(script))["params_sha256"] == undisturbed
        assert pool.service("resile_scheduler").pid != first.pid
    assert "another scheduler became leader" in (tmp_path / "home/logs/scheduler.log").read_text()
