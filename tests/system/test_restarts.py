"""The bus and the scheduler are killed again and again while jobs train: jobs go on, and nothing is doubled."""

import asyncio
import hashlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from resile.package import pack
from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.nats_server import NatsServer
from resile_shared.bus.subjects import JOBS
from resile_shared.messages.commands import Accepted, JobPriority, JobSubmit
from resile_shared.messages.jobs import JobRecord, JobSpec, JobState
from resile_testing.crash_points import CrashableService, Forker
from resile_testing.fixtures import Pool
from resile_testing.histories import check_history
from resile_testing.waiting import PATIENCE_SECONDS, until

from .paced import CALLBACK, Pace
from .running import plain

SEED = 1
TIMES = [10, pytest.param(50, marks=[pytest.mark.nightly])]

pytestmark = pytest.mark.long

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
seed(3)
inputs = torch.randn(480, 16)
targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
ElasticModel(
    model,
    lambda: (TensorDataset(inputs, targets), None),
    nn.CrossEntropyLoss(),
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    callbacks=[Pace(args.pace)],
).train(epochs=60, batch_size=48)
"""


class House:
    """A pool of real processes, without anything around it that starts again what dies but this test."""

    def __init__(self, pool: Pool, scheduler: CrashableService, storage: Path) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.storage = storage
        self.records: dict[str, JobRecord] = {}
        self.num_changes = 0
        self._requests: Bus | None = None

    async def watch(self) -> None:
        """Keep up with the records of jobs."""
        bus = await self.pool.bus("monitor")
        async for changes in bus.bucket(JOBS).watch():
            self.records |= {change.key: change.value for change in changes if change.value is not None}

    async def ask(self, request: JobSubmit | JobPriority) -> Accepted:
        """Have something done; what is not answered is asked again by itself."""
        self._requests = self._requests or await self.pool.bus("monitor", service="requests")
        verb = type(request).__name__.removeprefix("Job").lower()
        answer = await self._requests.ask(subjects.command("job", verb), request)
        assert isinstance(answer, Accepted), answer
        return answer

    async def submit(self, script: Path, *args: str) -> str:
        packed = pack(script)
        key = f"packages/{hashlib.sha256(packed.content).hexdigest()}.tar.gz"
        (self.storage / key).parent.mkdir(exist_ok=True)
        (self.storage / key).write_bytes(packed.content)
        spec = JobSpec(name=script.stem, package=key, script=packed.script, args=args)
        job = (await self.ask(JobSubmit(spec=spec))).job_id
        assert job is not None
        return job

    async def change(self, job: str) -> None:
        """Change something that is to be found in the history, and that moves slots now and then."""
        self.num_changes += 1
        await self.ask(JobPriority(job_id=job, priority=5000 + self.num_changes % 2 * 10_000 + self.num_changes))

    def is_(self, job: str, state: JobState) -> bool:
        return job in self.records and self.records[job].state is state


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        server = NatsServer(folder / "bus")
        await server.start()
        stack.push_async_callback(server.stop)
        pool = Pool(server, await stack.enter_async_context(AsyncExitStack()))
        storage = folder / "storage"
        storage.mkdir()
        (storage / "probe").write_text("this pool's")
        registry = await stack.enter_async_context(Forker.of("registry"))
        scheduler = await stack.enter_async_context(Forker.of("scheduler"))

        def flags(role: str, *more: str) -> tuple[str, ...]:
            return ("--credentials", str(server.credentials(role)), "--log-level", "warning", *more)

        leading = flags("scheduler", "--lease-seconds", "0.5")
        leader = CrashableService(scheduler, *leading, fatal=None, log=folder / "points-of-scheduler")
        keeper = CrashableService(registry, *flags("registry"), fatal=None, log=folder / "points-of-registry")
        await stack.enter_async_context(leader.running())
        await stack.enter_async_context(keeper.running())
        for number in (1, 2):
            place = ("--folder", str(folder / f"agent-{number}"), "--storage", storage.as_uri(), "--slots", "1")
            await stack.enter_async_context(agent(*flags("learner", *place, "--host", f"host-{number}")))
        found = House(pool, leader, storage)
        watching = asyncio.create_task(found.watch())
        stack.callback(watching.cancel)
        yield found


@asynccontextmanager
async def agent(*flags: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "resile_learner", *flags)
    try:
        yield
    finally:
        assert process.returncode is None, "an agent ended"
        process.kill()
        await process.wait()


async def under_restarts(folder: Path, number: int, restart: Callable[[House], Awaitable[None]]) -> None:
    """Restart something so many times while two jobs train and change; look whether all is well in the end."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    wanted = plain(script)
    pace = Pace(folder / "pace")
    moments = random.Random(SEED)
    async with house(folder) as pool:
        jobs = [await pool.submit(script, "--pace", str(pace.file)) for _ in range(2)]
        await until(lambda: all(pool.is_(job, JobState.RUNNING) for job in jobs))
        for _ in range(number):
            changing = asyncio.create_task(pool.change(jobs[0]))
            await asyncio.sleep(moments.uniform(0.0, 0.2))  # any moment of it is right
            await restart(pool)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await changing
        pace.fast_until(1 << 30)
        await until(lambda: all(pool.is_(job, JobState.COMPLETED) for job in jobs))
        for job in jobs:
            record = pool.records[job]
            assert record.completed is not None
            assert record.completed.params_sha256 == wanted
            assert all(count.once == count.samples for count in record.completed.ledger)
            kinds = [item.kind for item in await check_history(pool.pool, record)]
            assert kinds.count("accepted") == kinds.count("completed") == 1
            assert not set(kinds) & {"failed", "recovering"}
        changed = await check_history(pool.pool, pool.records[jobs[0]])
        assert [item.kind for item in changed].count("priority") == number


@pytest.mark.parametrize("number", TIMES)
async def test_jobs_go_on_while_the_bus_is_killed(number: int, tmp_path: Path) -> None:
    async def crash(pool: House) -> None:
        await pool.pool.crash()

    await under_restarts(tmp_path, number, crash)


@pytest.mark.parametrize("number", TIMES)
async def test_jobs_go_on_while_the_scheduler_is_killed(number: int, tmp_path: Path) -> None:
    async def kill(pool: House) -> None:
        await pool.scheduler.crash()

    await under_restarts(tmp_path, number, kill)
