"""What the cores decided in a real pool under attack, they decide again from the same events: they are pure.

The simulated world runs the same cores. This shows that nothing in their surroundings decides for them, and that what a
real bus, real agents and real workers make happen leads nowhere else.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

import resile_registry.service
import resile_scheduler.service
from resile_registry.core import Registry
from resile_registry.settings import RegistrySettings
from resile_scheduler.core.core import Scheduler
from resile_scheduler.settings import SchedulerSettings
from resile_shared.bus import subjects
from resile_shared.bus.subjects import JOBS
from resile_shared.messages.commands import Accepted, JobPause, JobPriority, JobResume, JobSubmit
from resile_shared.messages.jobs import JobSpec, JobState
from resile_testing.fixtures import Pool
from resile_testing.services import in_process
from resile_testing.waiting import PATIENCE_SECONDS

from ..learner.agents import Stage, until
from .recording import Recording, record

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "chaos" / "scripts" / "attacked.py"


@asynccontextmanager
async def agent(pool: Pool, stage: Stage, host: str, recordings: list[Recording]) -> AsyncIterator[None]:
    """Run a recorded agent; end it with SIGTERM."""
    file = stage.folder / f"{host}.recording"
    command = [sys.executable, "-m", "tests.world.recorded_agent", "--credentials", pool.server.credentials("learner")]
    command += ["--folder", stage.folder / host, "--storage", stage.storage.as_uri(), "--host", host, "--slots", "2"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env={**os.environ, "RECORDING": str(file)})
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
    recordings += pickle.loads(file.read_bytes())


def workers() -> list[psutil.Process]:
    """The worker processes of all agents: two levels below each."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if len(process.parents()) == len(psutil.Process().parents()) + 3:
                found.append(process)
    return found


async def reach(stage: Stage, job: str, *states: JobState) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(stage.bus.bucket(JOBS).watch(job)) as changes:
        async for batch in changes:
            if any(change.value and change.value.state in states for change in batch):
                return


@pytest.mark.long
async def test_what_the_cores_of_an_attacked_pool_decided_they_decide_again(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings: list[Recording] = []
    record(Registry, recordings, monkeypatch.setattr)
    record(Scheduler, recordings, monkeypatch.setattr)
    stage = await Stage.open(pool, tmp_path)
    monitor = await pool.bus("monitor", service="users")
    package = stage.store_package({"train.py": SCRIPT.read_text()})

    async def submit(name: str) -> str:
        spec = JobSpec(name=name, package=package, script="train.py", max_workers=3, args=("--epochs", "12"))
        answer = await monitor.ask(subjects.command("job", "submit"), JobSubmit(spec=spec))
        assert isinstance(answer, Accepted)
        assert answer.job_id is not None
        return answer.job_id

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(in_process(pool, "registry", resile_registry.service.run, RegistrySettings))
        await stack.enter_async_context(in_process(pool, "scheduler", resile_scheduler.service.run, SchedulerSettings))
        await stack.enter_async_context(agent(pool, stage, "host-1", recordings))
        async with agent(pool, stage, "host-2", recordings):
            first, second = await submit("first"), await submit("second")
            await reach(stage, first, JobState.RUNNING)
            workers()[0].kill()
            await monitor.ask(subjects.command("job", "priority"), JobPriority(job_id=second, priority=9000))
            await until(lambda: len(workers()) >= 3)
            await pool.crash()
            await monitor.ask(subjects.command("job", "pause"), JobPause(job_id=second))
        await reach(stage, second, JobState.PAUSED, JobState.COMPLETED)
        await monitor.ask(subjects.command("job", "resume"), JobResume(job_id=second))
        await reach(stage, first, JobState.COMPLETED)
        await reach(stage, second, JobState.COMPLETED)
    await stage.close()
    monkeypatch.undo()
    assert {recording.core.__name__ for recording in recordings} == {"Registry", "Scheduler", "AgentCore"}
    assert sum(len(recording.steps) for recording in recordings) > 50
    for recording in recordings:
        recording.replay()
