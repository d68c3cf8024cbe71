"""A job that is watched through whatever happens to its hosts, and what it must have kept at its end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from resile.client import AsyncClient
from resile_shared.http.api import HostView, JobView
from resile_shared.messages.jobs import JobState
from resile_testing.waiting import PATIENCE_SECONDS

from .paced import CALLBACK, LOOK_SECONDS, Pace, becomes, submit
from .running import run

EVER = 10**6
SCRIPT = f"""
import argparse
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import ElasticModel, seed
{CALLBACK}
parser = argparse.ArgumentParser()
parser.add_argument("--pace")
args = parser.parse_args()

class Count(Callback):
    def on_iteration(self, loop, iteration):
        pathlib.Path(args.pace + ".count").write_text(str(iteration.number))

seed(0)
inputs = torch.randn(241, 16)
targets = (inputs[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ElasticModel(
    model,
    lambda: (TensorDataset(inputs, targets), None),
    nn.CrossEntropyLoss(),
    optimizer,
    callbacks=[Count(), Pace(args.pace)],
).train(epochs=40, batch_size=24, num_shards=6, checkpoint_every=50)
"""


@pytest.fixture(scope="session")
def trial_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of all trials."""
    file = tmp_path_factory.mktemp("code") / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture(scope="session")
def trial_sha(trial_script: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters that an undisturbed run on one worker ends with, without a pool."""
    folder = tmp_path_factory.mktemp("alone")
    pace = Pace(folder / "pace")
    pace.fast_until(EVER)
    return run(trial_script, "--workers", "1", home=folder / "home", args=("--pace", str(pace.file))).sha


class Trial:
    """A job with a worker on each of ``num_hosts`` hosts, watched from the first generation to the last."""

    def __init__(self, client: AsyncClient, job: str, pace: Pace, *, num_hosts: int) -> None:
        self.client = client
        self.job = job
        self.pace = pace
        self.num_hosts = num_hosts

    async def spreads(self) -> JobView:
        """Wait until it trains on all hosts."""
        return await becomes(self.client, self.job, lambda job: _trains(job, self.num_hosts))

    async def goes_on(self, *, workers: int) -> JobView:
        """Wait until it has committed some iterations on so many hosts, after now."""
        shape = await becomes(self.client, self.job, lambda job: _trains(job, workers))
        return await becomes(
            self.client,
            self.job,
            lambda job: _trains(job, workers) and job.iteration >= shape.iteration + 3,
        )

    async def host(self, name: str) -> HostView:
        (found,) = (host for host in await self.client.hosts() if host.id == name)
        return found

    async def trains_on_unseen(self) -> None:
        """Wait until its script has seen some iterations more, whatever the pool knows of it."""
        start = self._count()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._count() < start + 10:
            assert time.monotonic() < deadline
            await asyncio.sleep(LOOK_SECONDS)

    def _count(self) -> int:
        file = self.pace.file.with_name("pace.count")
        return int(file.read_text() or 0) if file.exists() else 0

    async def keeps_its_promises(self, trial_sha: str) -> None:
        """Let it end, and compare: same bits, each sample once, one lineage."""
        self.pace.fast_until(EVER)
        view = await becomes(self.client, self.job, lambda job: job.state is JobState.COMPLETED)
        assert view.params_sha256 == trial_sha
        for epoch in (await self.client.ledger(self.job)).epochs:
            assert (epoch.once, epoch.more, epoch.never) == (epoch.samples, 0, 0)
        assert [item.number for item in view.history] == list(range(1, len(view.history) + 1))
        allocations = [item for item in view.history if item.kind == "allocation"]
        for before, after in pairwise(allocations):
            assert before.generation < after.generation
            assert before.iteration <= after.iteration


def _trains(job: JobView, workers: int) -> bool:
    return job.state is JobState.RUNNING and job.workers == workers


@asynccontextmanager
async def trying(client: AsyncClient, script: Path, folder: Path, *, num_hosts: int) -> AsyncIterator[Trial]:
    """Submit the job; behind the block it is over."""
    pace = Pace(folder / "pace")
    job = await submit(client, script, "--pace", pace.file, name="trial", max_workers=num_hosts)
    yield Trial(client, job, pace, num_hosts=num_hosts)
    if not (await client.job(job)).state.is_final:
        await client.stop(job)
