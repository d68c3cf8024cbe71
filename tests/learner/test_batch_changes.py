"""Real workers whose orders change the global batch: which batches they train with, and that those can be replayed."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from resile_shared.messages.reports import Completed, Progress, Report, Switched
from resile_testing.fixtures import Pool

from .agents import Stage, until

EPOCHS, SAMPLES = 30, 481
SCRIPT = f"""
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import Callback, ElasticModel, seed

print("pid", os.getpid(), flush=True)

class Pace(Callback):
    def on_iteration(self, loop, iteration):
        if not os.path.exists(os.environ["HURRY"]):
            time.sleep(0.08)

inputs = torch.randn({SAMPLES}, 4, generator=torch.Generator().manual_seed(0))
seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
ElasticModel(
    model,
    lambda: (TensorDataset(inputs, inputs.sum(1, keepdim=True)), None),
    nn.MSELoss(),
    optimizer,
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
    callbacks=[Pace()],
).train(epochs={EPOCHS}, batch_size=48, num_shards=24, batch_range=(16, 192))
"""


@pytest_asyncio.fixture
async def stage(pool: Pool, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = await Stage.open(pool, tmp_path)
    try:
        yield stage
    finally:
        await stage.close()


async def switched(stage: Stage, generation: int) -> int:
    """Wait until the generation trains, and some more iterations; return the first that it trained."""
    await until(lambda: any(report.generation == generation for report in stage.said("job-1", "switched")))
    (first,) = {_iteration(report) for report in stage.said("job-1", "switched") if report.generation == generation}
    await until(lambda: any(_iteration(report) >= first + 3 for report in stage.said("job-1", "progress")))
    return first


def _iteration(report: Report) -> int:
    assert isinstance(report.content, Switched | Progress)
    return report.content.iteration


async def replay(script: Path, batches: str, *options: str, home: Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "resile", "run", str(script), "--batches", batches, "--json", "--home", str(home)),
        *options,
        env={**os.environ, "HURRY": str(script)},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


async def test_generations_have_the_batches_of_their_orders_and_one_worker_replays_them(
    stage: Stage, tmp_path: Path
) -> None:
    await stage.start_agent()
    await stage.submit("job-1", SCRIPT, env=stage.variables())
    await stage.allocate("job-1", 1, (0, 1), cold_start=True)
    await switched(stage, 1)
    await stage.allocate("job-1", 2, (0, 1), batch_size=96)
    second = await switched(stage, 2)
    await stage.allocate("job-1", 3, (0, 1, 2), batch_size=20)
    third = await switched(stage, 3)
    (victim,) = [int(line.split()[1]) for worker, line in stage.lines if worker == 2 and line.startswith("pid ")]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: stage.said("job-1", "peer_suspected"))
    await stage.allocate("job-1", 4, (0, 1), is_recovery=True)
    await switched(stage, 4)
    await stage.allocate("job-1", 5, (1,), batch_size=192)
    fifth = await switched(stage, 5)
    stage.hurry.touch()
    await until(lambda: stage.said("job-1", "completed"))
    completed = stage.said("job-1", "completed")[-1].content
    assert isinstance(completed, Completed)
    found = [(step.iteration, step.batch_size) for step in completed.batches]
    assert found == [(0, 48), (second, 96), (third, 20), (fifth, 192)], "and the recovery went on with its batch"
    assert sum(count.once * count.num_epochs for count in completed.ledger) // SAMPLES == EPOCHS
    assert {(count.more, count.never) for count in completed.ledger} == {(0, 0)}

    measured = [(report.generation, report.content.measurement) for report in stage.said("job-1", "progress")]  # type: ignore[union-attr]
    configurations = {(number, m.workers, m.hosts, m.batch_size) for number, m in measured if m}
    expected = {(1, 2, 1, 48), (2, 2, 1, 96), (3, 3, 1, 20), (4, 2, 1, 20), (5, 1, 1, 192)}
    assert configurations <= expected
    assert {(number, workers) for number, workers, *_ in configurations} >= {(1, 2), (2, 2), (3, 3), (4, 2)}

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    text = ",".join(f"{iteration}:{size}" for iteration, size in found)
    alone = await replay(script, text, "--workers", "1", home=tmp_path / "home")
    assert alone["params_sha256"] == completed.params_sha256
    assert [(step["iteration"], step["batch_size"]) for step in alone["batches"]] == found
    assert alone["iterations_total"] == alone["iteration"] == completed.iteration
