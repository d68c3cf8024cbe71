"""Many jobs on one pool: all come to their ends, shares follow the policy, and every record agrees with every other."""

import asyncio
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from resile.chaos.verdict import histories, slots_held_twice
from resile.client import AsyncClient, find_server
from resile.demo.verdict import used_once
from resile_scheduler.policies.demand import Demand
from resile_scheduler.policies.ranked import fairshare
from resile_shared.http.api import HostView, JobSummary, JobView
from resile_shared.messages.jobs import JobEvent, JobState
from resile_testing.waiting import PATIENCE_SECONDS

from .paced import CALLBACK, LOOK_SECONDS, Pace, becomes, submit
from .pools import UpPool, pool_up

NUM_JOBS, NUM_SLOTS = 10, 8
EVER = 10**6
QUIET_SECONDS = 1.0

SCRIPT = f"""
import argparse, fcntl, os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import ElasticModel, seed
{CALLBACK}
parser = argparse.ArgumentParser()
parser.add_argument("--pace")
parser.add_argument("--seats")
parser.add_argument("--shards", type=int)
args = parser.parse_args()

def take_seat(folder):
    for number in range({NUM_SLOTS}):
        seat = open(folder / str(number), "w")
        try:
            fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return seat
        except BlockingIOError:
            seat.close()
    (folder / f"{{os.getpid()}} found none").touch()

seat = take_seat(pathlib.Path(args.seats))
seed(0)
inputs = torch.randn(240, 8)
targets = (inputs[:, 0] > 0).long()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ElasticModel(
    model, lambda: (TensorDataset(inputs, targets), None), nn.CrossEntropyLoss(), optimizer, callbacks=[Pace(args.pace)]
).train(epochs=30, batch_size=24, num_shards=args.shards, checkpoint_every=50)
"""


@dataclass(frozen=True)
class Work:
    """What one job asks for."""

    after_seconds: float
    shards: int
    min_workers: int
    max_workers: int
    priority: int


def some_work(chance: random.Random) -> list[Work]:
    """Jobs of mixed sizes and priorities, at random moments."""
    sizes = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 4), (3, 6)]
    return [
        Work(
            after_seconds=chance.expovariate(1.5),
            shards=chance.choice([6, 8, 12]),
            min_workers=least,
            max_workers=most,
            priority=chance.choice([1000, 3000, 5000, 5000, 9000, 20_000]),
        )
        for least, most in chance.choices(sizes, k=NUM_JOBS)
    ]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[UpPool]:
    """Two hosts of four slots."""
    with pool_up(tmp_path / "home", "--hosts", 2, "--slots", NUM_SLOTS // 2) as pool:
        yield pool


@pytest.mark.nightly
async def test_ten_jobs_share_by_the_policy_and_no_slot_is_held_twice(pool: UpPool, tmp_path: Path) -> None:
    chance = random.Random(1)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    (tmp_path / "seats").mkdir()
    async with AsyncClient(find_server(home=pool.home)) as client:
        crowd = Crowd(client, tmp_path)
        for work in some_work(chance):
            await asyncio.sleep(work.after_seconds)
            await crowd.add(work)
        await crowd.settles()

        changed, paused, stopped = (job.id for job in chance.sample(await crowd.running(), 3))
        await client.set_priority(changed, 40_000)
        await crowd.settles()
        await client.pause(paused)
        await becomes(client, paused, lambda job: job.state is JobState.PAUSED)
        await crowd.settles()
        await client.stop(stopped)
        await client.resume(paused)
        await crowd.settles()

        for job in chance.sample(sorted(crowd.paces), NUM_JOBS):
            crowd.paces[job].fast_until(EVER)
            await asyncio.sleep(chance.expovariate(2.0))
        views = await crowd.ended()
        stream = [
            JobEvent.model_validate(event.data)
            for event in await client.events(tail=10_000)
            if event.subject.startswith("resile.job.")
        ]
    for view in views:
        assert view.state is (JobState.STOPPED if view.id == stopped else JobState.COMPLETED), view
    assert not list(histories(views, stream))
    assert not list(slots_held_twice(stream))
    assert {file.name for file in (tmp_path / "seats").iterdir()} == set(map(str, range(NUM_SLOTS)))
    assert_same_bits([view for view in views if view.id != stopped])


class Crowd:
    """The jobs of a pool, each with a pace of its own."""

    def __init__(self, client: AsyncClient, folder: Path) -> None:
        self.paces: dict[str, Pace] = {}
        self._client = client
        self._folder = folder
        self._works: dict[str, Work] = {}

    async def add(self, work: Work) -> None:
        """Submit a job."""
        name = f"job-{len(self.paces)}"
        pace = Pace(self._folder / name)
        job = await submit(
            self._client,
            self._folder / "code" / "train.py",
            *("--pace", pace.file, "--seats", self._folder / "seats", "--shards", work.shards),
            name=name,
            min_workers=work.min_workers,
            max_workers=work.max_workers,
            priority=work.priority,
        )
        self.paces[job], self._works[job] = pace, work

    async def running(self) -> list[JobSummary]:
        """Return the jobs that train and are not about to change."""
        return [job for job in await self._client.jobs() if job.state is JobState.RUNNING]

    async def settles(self) -> None:
        """Wait until nothing changes any more and each job has the workers that the policy gives it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        seen: object = None
        since = time.monotonic()
        while True:
            jobs, hosts = await asyncio.gather(self._client.jobs(), self._client.hosts())
            before, seen = seen, [(job.id, job.state, job.generation, job.priority, job.slots) for job in jobs]
            workers = {job.id: job.workers for job in jobs if not job.state.is_final}
            if seen != before or not is_quiet(jobs, hosts) or workers != self._shares(jobs):
                since = time.monotonic()
            elif time.monotonic() - since >= QUIET_SECONDS:
                break
            assert time.monotonic() < deadline, (self._shares(jobs), jobs)
            await asyncio.sleep(LOOK_SECONDS)

    def _shares(self, jobs: Sequence[JobSummary]) -> dict[str, int]:
        active = (JobState.QUEUED, JobState.RUNNING)
        demands = []
        for number, job in enumerate(jobs):
            shards = self._works[job.id].shards
            if job.state in active:
                most = min(job.max_workers, NUM_SLOTS, shards)
                demands.append(
                    Demand(job.id, number, job.priority, job.min_workers, most, shards, holds_slots=bool(job.workers))
                )
        shares = fairshare(demands, NUM_SLOTS)
        return {job.id: shares[job.id].workers if job.id in shares else 0 for job in jobs if not job.state.is_final}

    async def ended(self) -> list[JobView]:
        """Wait until all jobs are over."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        jobs = await self._client.jobs()
        while not all(job.state.is_final for job in jobs):
            assert time.monotonic() < deadline, jobs
            await asyncio.sleep(LOOK_SECONDS)
            jobs = await self._client.jobs()
        return [await self._client.job(job.id) for job in jobs]


def is_quiet(jobs: Iterable[JobSummary], hosts: Iterable[HostView]) -> bool:
    """Whether no job is between two states, and every slot is held by the job that trains on it and no other."""
    lasting = (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED)
    held = {slot.name: slot.job for host in hosts for slot in host.slots if slot.job}
    return held == {slot: job.id for job in jobs for slot in job.slots} and all(
        job.state.is_final or (job.state in lasting and job.iteration != job.iterations_total) for job in jobs
    )


def assert_same_bits(views: Iterable[JobView]) -> None:
    """Jobs that differ in nothing but what happened to them have equal parameters, and used every sample once."""
    shas: dict[str, set[str | None]] = {}
    for view in views:
        shas.setdefault(view.args[-1], set()).add(view.params_sha256)
        assert [epoch.samples for epoch in view.ledger] == 30 * [240]
        assert all(map(used_once, view.ledger))
    assert all(len(equal) == 1 for equal in shas.values()), shas
