"""A real agent on a real bus, with real workers: it does what allocations say, and tells all that happens."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from resile_shared.testing.fixtures import Pool

from .agents import Stage, until

TRAIN = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import Callback, ElasticModel

ours = sorted(name for name in os.environ if name.startswith("RESILE_"))
print("script", ours, os.environ["COLOR"], sys.argv[1:])
output = os.environ["RESILE_OUTPUT_DIR"]

class Watch(Callback):
    def on_iteration(self, loop, iteration):
        with open(os.path.join(output, "iterations.txt"), "a") as file:
            file.write(f"{iteration.number}\\n")
        while not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.01)
            if iteration.number < 20:
                break

inputs = torch.randn(480, 4, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.Linear(4, 1)
ElasticModel(
    model,
    lambda: (TensorDataset(inputs, inputs.sum(1, keepdim=True)), None),
    nn.MSELoss(),
    torch.optim.SGD(model.parameters(), lr=0.01),
    callbacks=[Watch()],
).train(epochs=3, batch_size=48, num_shards=4)
print("through")
"""


@pytest_asyncio.fixture
async def stage(pool: Pool, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = await Stage.open(pool, tmp_path)
    try:
        yield stage
    finally:
        await stage.close()


async def test_a_job_is_founded_grown_shrunk_and_completed_as_its_allocations_say(stage: Stage) -> None:
    agent = await stage.start_agent()
    go_on = stage.folder / "go-on"
    await stage.submit("job-1", TRAIN, args=("--deep",), env={"COLOR": "blue", "GO_ON": str(go_on)})
    await until(lambda: stage.hellos)
    await stage.allocate("job-1", 1, (0, 1), founding=True)
    await until(lambda: stage.said("job-1", "switched"))
    await stage.allocate("job-1", 2, (0, 1, 2))
    await until(lambda: stage.said("job-1", "switched")[-1].generation == 2)
    await stage.allocate("job-1", 3, (0,))
    await until(lambda: stage.worker("job-1", 1).state == stage.worker("job-1", 2).state == "gone")
    assert stage.worker("job-1", 1).exit.kind == "left"
    go_on.touch()
    await until(lambda: stage.said("job-1", "completed"))
    await until(lambda: stage.worker("job-1", 0).state == "gone")
    assert stage.worker("job-1", 0).exit.kind == "finished"
    assert await stage.end_agent(agent, signal.SIGTERM) == 0
