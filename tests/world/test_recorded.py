"""What the cores decided in a real pool under attack, they decide again from the same events: they are pure.

The simulated world runs the same cores. This shows that nothing in their surroundings decides for them, and that what a
real bus, real agents and real workers make happen leads nowhere else.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import resile_learner.agent.service
import resile_registry.service
import resile_scheduler.service
from resile_learner.agent.core import AgentCore
from resile_learner.agent.settings import LearnerSettings
from resile_registry.core import Registry
from resile_registry.settings import RegistrySettings
from resile_scheduler.core.core import Scheduler
from resile_scheduler.settings import SchedulerSettings
from resile_shared import subjects
from resile_shared.messages.commands import Accepted, JobPause, JobPriority, JobResume, JobSubmit
from resile_shared.messages.jobs import JobSpec, JobState
from resile_shared.subjects import JOBS
from resile_shared.testing.fixtures import Pool
from resile_shared.testing.services import in_process

from ..learner.agents import Stage, until

SCRIPT = Path(__file__).parents[1] / "chaos" / "scripts" / "attacked.py"
CORES: tuple[type[Any], ...] = (Registry, Scheduler, AgentCore)


@dataclass
class Recording:
    """The life of one core: how it was made, and all that it was told and answered."""

    core: type[Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    steps: list[tuple[Any, float, list[Any]]] = field(default_factory=list)

    def replay(self) -> None:
        """Tell a new core the same; it has to answer the same."""
        arguments, keywords = self.arguments
        core = self.core(*arguments, **keywords)
        for number, (event, now, commands) in enumerate(self.steps):
            assert core.handle(event, now=now) == commands, f"step {number} of {self.core.__name__}: {event}"


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Every core of this process from now on."""
    found: list[Recording] = []
    for core in CORES:
        _record(core, found, monkeypatch)
    return found


def _record(core: type[Any], found: list[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    make, handle = core.__init__, core.handle
    of: dict[int, Recording] = {}

    def recorded_init(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        of[id(self)] = Recording(core, (arguments, keywords))
        found.append(of[id(self)])

    def recorded_handle(self: Any, event: Any, *, now: float) -> list[Any]:
        commands: list[Any] = handle(self, event, now=now)
        of[id(self)].steps.append((event, now, list(commands)))
        return commands

    monkeypatch.setattr(core, "__init__", recorded_init)
    monkeypatch.setattr(core, "handle", recorded_handle)


@asynccontextmanager
async def agent(pool: Pool, stage: Stage, host: str) -> AsyncIterator[None]:
    values: dict[str, object] = {"folder": stage.folder / host, "storage": stage.storage.as_uri(), "slots": 2}
    async with in_process(pool, "learner", resile_learner.agent.service.run, LearnerSettings, host=host, **values):
        yield


def workers() -> list[psutil.Process]:
    """The worker processes below the fork servers of this process."""
    servers = [c for c in psutil.Process().children() if any("fork_server" in part for part in c.cmdline())]
    return [worker for server in servers for worker in server.children()]


async def reach(stage: Stage, job: str, *states: JobState) -> None:
    async with asyncio.timeout(100), aclosing(stage.bus.bucket(JOBS).watch(job)) as changes:
        async for batch in changes:
            if any(change.value and change.value.state in states for change in batch):
                return


@pytest.mark.long
async def test_what_the_cores_of_an_attacked_pool_decided_they_decide_again(
    pool: Pool, tmp_path: Path, recordings: list[Recording]
) -> None:
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
        await stack.enter_async_context(agent(pool, stage, "host-1"))
        async with agent(pool, stage, "host-2"):
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
    assert {recording.core for recording in recordings} == set(CORES)
    assert sum(len(recording.steps) for recording in recordings) > 50
    for recording in recordings:
        recording.replay()
