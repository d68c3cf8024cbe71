"""Hosts in network namespaces, with a real pool and a real job: cables are cut, and the job keeps its promises."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from resile.client import Client, find_server
from resile.pool.namespaces import Namespaces
from resile_shared.api import HostView, JobView
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobState

from .paced import CALLBACK, LOOK_SECONDS, Pace, becomes, host_becomes, submit
from .pools import UpPool, pool_up
from .running import run

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

NUM_HOSTS = 3
EVER = 10**6
CHANGES = {"allocation", "recovering", "queued"}
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


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """Three hosts of one slot, each in a namespace; so are the services and the bus."""
    with pool_up(tmp_path_factory.mktemp("cut") / "home", "--namespaces", "--hosts", NUM_HOSTS, "--slots", 1) as pool:
        yield pool


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("code") / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture(scope="module")
def undisturbed(script: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters of a run on one worker, without a pool."""
    folder = tmp_path_factory.mktemp("alone")
    pace = Pace(folder / "pace")
    pace.fast_until(EVER)
    return run(script, "--workers", "1", home=folder / "home", args=("--pace", str(pace.file))).sha


@pytest.fixture
def network(pool: UpPool) -> Iterator[Namespaces]:
    """The cables of the pool, whole before and after."""
    network = Namespaces.of(pool.home)
    yield network
    network.mend_all()


class Trial:
    """A job on all hosts, watched from the first generation to the last."""

    def __init__(self, client: Client, job: str, pace: Pace) -> None:
        self.client = client
        self.job = job
        self.pace = pace

    async def spreads(self) -> JobView:
        """Wait until it trains on all hosts."""
        return await becomes(self.client, self.job, lambda job: _trains(job, NUM_HOSTS))

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
        deadline = time.monotonic() + 60.0
        while self._count() < start + 10:
            assert time.monotonic() < deadline
            await asyncio.sleep(LOOK_SECONDS)

    def _count(self) -> int:
        return int(self.pace.file.with_name("pace.count").read_text() or 0)

    async def keeps_its_promises(self, undisturbed: str) -> None:
        """Let it end, and compare: same bits, each sample once, one lineage."""
        self.pace.fast_until(EVER)
        view = await becomes(self.client, self.job, lambda job: job.state is JobState.COMPLETED)
        assert view.params_sha256 == undisturbed
        for epoch in (await self.client.ledger(self.job)).epochs:
            assert (epoch.once, epoch.more, epoch.never) == (epoch.samples, 0, 0)
        assert [item.number for item in view.history] == list(range(1, len(view.history) + 1))
        allocations = [item for item in view.history if item.kind == "allocation"]
        for before, after in pairwise(allocations):
            assert before.generation < after.generation
            assert before.iteration <= after.iteration


def _trains(job: JobView, workers: int) -> bool:
    return job.state is JobState.RUNNING and job.workers == workers


@pytest_asyncio.fixture
async def trial(pool: UpPool, script: Path, tmp_path: Path, network: Namespaces) -> AsyncIterator[Trial]:
    async with Client(find_server(home=pool.home)) as client:
        for number in range(1, NUM_HOSTS + 1):
            await host_becomes(client, f"host-{number}", lambda host: host.state is HostState.UP)
        pace = Pace(tmp_path / "pace")
        job = await submit(client, script, "--pace", pace.file, name="cut", max_workers=NUM_HOSTS)
        yield Trial(client, job, pace)
        if not (await client.job(job)).state.is_final:
            await client.stop(job)


async def test_a_host_that_is_cut_off_is_left_behind_and_comes_back_anew(
    trial: Trial, network: Namespaces, undisturbed: str
) -> None:
    await trial.spreads()
    incarnation = (await trial.host("host-1")).incarnation
    network.cut("host-1")
    view = await trial.goes_on(workers=NUM_HOSTS - 1)
    assert not any(slot.startswith("host-1/") for slot in view.slots)
    await host_becomes(trial.client, "host-1", lambda host: host.state is HostState.LOST)
    network.mend("host-1")
    await host_becomes(
        trial.client, "host-1", lambda host: host.state is HostState.UP and host.incarnation > incarnation
    )
    await trial.goes_on(workers=NUM_HOSTS)
    await trial.keeps_its_promises(undisturbed)


async def test_two_hosts_that_cannot_talk_do_not_train_together_until_they_can(
    trial: Trial, network: Namespaces, undisturbed: str
) -> None:
    await trial.spreads()
    network.cut_between("host-1", "host-2")
    view = await trial.goes_on(workers=NUM_HOSTS - 1)
    assert "host-3/0" in view.slots
    assert {host.state for host in await trial.client.hosts()} == {HostState.UP}
    network.mend_between("host-1", "host-2")
    await trial.goes_on(workers=NUM_HOSTS)
    await trial.keeps_its_promises(undisturbed)


async def test_the_loss_of_one_direction_is_the_loss_of_both(
    trial: Trial, network: Namespaces, undisturbed: str
) -> None:
    await trial.spreads()
    network.cut_one_way("host-3", "host-2")
    view = await trial.goes_on(workers=NUM_HOSTS - 1)
    assert "host-1/0" in view.slots
    network.mend_one_way("host-3", "host-2")
    await trial.goes_on(workers=NUM_HOSTS)
    await trial.keeps_its_promises(undisturbed)


async def test_a_slow_host_is_waited_for(trial: Trial, network: Namespaces, undisturbed: str) -> None:
    await trial.spreads()
    before = len((await trial.client.job(trial.job)).history)
    network.slow("host-2", "1mbit")
    await trial.goes_on(workers=NUM_HOSTS)
    network.unslow("host-2")
    after = await trial.goes_on(workers=NUM_HOSTS)
    assert not CHANGES & {item.kind for item in after.history[before:]}
    await trial.keeps_its_promises(undisturbed)


async def test_a_cut_off_bus_stops_nobody_and_nobody_is_lost(
    trial: Trial, network: Namespaces, undisturbed: str
) -> None:
    before = await trial.spreads()
    incarnations = {host.id: host.incarnation for host in await trial.client.hosts()}
    network.cut("bus")
    await trial.trains_on_unseen()
    network.mend("bus")
    after = await trial.goes_on(workers=NUM_HOSTS)
    assert after.generation == before.generation
    assert {host.id: host.incarnation for host in await trial.client.hosts()} == incarnations
    await trial.keeps_its_promises(undisturbed)
