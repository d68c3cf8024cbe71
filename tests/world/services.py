"""Registry, schedulers and agents: the real shells, each in a process that is started again when it ends."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import resile_registry.service
import resile_scheduler.service
from resile_learner.agent.service import Agent
from resile_learner.agent.settings import LearnerSettings
from resile_registry.settings import RegistrySettings
from resile_scheduler.lease import LeadershipLost
from resile_scheduler.settings import SchedulerSettings
from resile_shared.bus.buckets import ConflictError, FencedError
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import BusClosed
from resile_shared.bus.credentials import Credentials
from resile_shared.pool_settings import load_pool_settings
from resile_shared.service import ServiceContext

from .loop import Clock, Process, SimLoop
from .patches import SimFolder

RESTART_SECONDS = 1.0
EXPECTED = (LeadershipLost, ConflictError, FencedError, BusClosed)
"""What may end a service: it finds that another one has taken over."""
NOWHERE = Path("/nowhere")
STORAGE = "sim://storage"

Run = Callable[[ServiceContext[Any]], Awaitable[None]]


async def open_bus(role: str) -> Bus:
    """Connect the current process to the simulated bus."""
    return await Bus.open(Credentials(url="sim", user=role, password=""), service=role)


class Service:
    """One service on one host. ``errors`` gets what ended it and should not have."""

    def __init__(self, loop: SimLoop, name: str, run: Run, settings: Any, *, host: str, clock: Clock) -> None:
        self.name = name
        self.host = host
        self.clock = clock
        self.errors: list[str] = []
        self.num_starts = 0
        self.is_wanted = True
        self._loop = loop
        self._run = run
        self.settings = settings
        self.process = self._start()

    def crash(self) -> None:
        """Kill it; it is started again after a moment, unless ``stop`` was called."""
        self.process.crash()

    def stop(self) -> None:
        """Kill it for good."""
        self.is_wanted = False
        self.process.crash()

    def restart(self) -> None:
        """Start it again after ``stop``."""
        if not self.is_wanted:
            self.is_wanted = True
            self.process = self._start()

    def change(self, settings: Any) -> None:
        """Start it again with other settings."""
        self.settings = settings
        self.process.crash()

    def _start(self) -> Process:
        self.num_starts += 1
        process = Process(self._loop, f"{self.name}#{self.num_starts}", host=self.host, clock=self.clock)
        process.on_death.append(self._on_death)
        process.spawn(self._main(process))
        return process

    def _on_death(self) -> None:
        self._loop.call_later(RESTART_SECONDS, self._start_again, self.num_starts)

    def _start_again(self, number: int) -> None:
        if self.is_wanted and number == self.num_starts:
            self.process = self._start()

    async def _main(self, process: Process) -> None:
        try:
            bus = await open_bus(self.name)
            await self._run(ServiceContext(self.name, self.settings, bus))
        except BaseException as error:
            if process.is_dead:  # long since, and is collected as garbage now
                raise
            if not _is_expected(error):
                self.errors.append(f"{process.name} ended with {error!r}{_leaves(error)}")
        process.crash()


def _is_expected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_expected, error.exceptions))
    return isinstance(error, EXPECTED)


def _leaves(error: BaseException) -> str:
    return f": {error.exceptions!r}" if isinstance(error, BaseExceptionGroup) else ""


def registry(loop: SimLoop, *, detection_seconds: float) -> Service:
    settings = RegistrySettings(credentials=NOWHERE, detection_seconds=detection_seconds)
    return Service(loop, "registry", resile_registry.service.run, settings, host="registry", clock=Clock())


KEPT_JOBS = (0, 1, 1000)
KEPT_SECONDS = (10.0, 20.0, 1e6)
"""For how many jobs, and for how long, pools keep them that forget; and hosts."""


def forgetting(settings: RegistrySettings, number: int) -> RegistrySettings:
    """Return ``settings`` of a pool that keeps as little of what has ended as ``number`` says."""
    keep_days = KEPT_SECONDS[number // len(KEPT_JOBS) % len(KEPT_SECONDS)] / 86400
    return settings.model_copy(update={"keep_jobs": KEPT_JOBS[number % len(KEPT_JOBS)], "keep_days": keep_days})


def scheduler(loop: SimLoop, number: int, **settings: Any) -> Service:
    chosen = SchedulerSettings(credentials=NOWHERE, storage=STORAGE, **settings)
    host = f"scheduler-{number}"
    return Service(loop, "scheduler", resile_scheduler.service.run, chosen, host=host, clock=Clock())


class Host(Service):
    """One host: its agent, the workers below it, its disk and its clock."""

    def __init__(self, loop: SimLoop, name: str, *, num_slots: int, labels: str, clock: Clock) -> None:
        self.folder = SimFolder()
        settings = LearnerSettings(
            credentials=NOWHERE,
            folder=NOWHERE,
            storage=STORAGE,
            host=name,
            slots=num_slots,
            labels=labels,
            address=name,
        )
        super().__init__(loop, "learner", self._run_agent, settings, host=name, clock=clock)

    async def _run_agent(self, context: ServiceContext[LearnerSettings]) -> None:
        pool = await load_pool_settings(context.bus, detection_seconds=None)
        await Agent(context, self.folder, pool).run()  # type: ignore[arg-type]
