"""Simulated environments of jobs: builds that take time, fail everywhere or on one host, and are on the host's disk."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from resile_learner.environments import Environment, EnvironmentFailed

from .loop import current_process
from .patches import SimPath


@dataclass(frozen=True)
class SimPackages:
    """What a job requires: packages that take so long to build, and may fail to."""

    build_seconds: float = 1.0
    is_missing: bool = False
    """Whether no host can build them."""
    failing_host: int = 0
    """The number of a host on which pip is killed the first two times; 0: of none."""

    @property
    def requirements(self) -> tuple[str, ...]:
        """The same, as a job requires it."""
        missing = ("is-missing",) if self.is_missing else ()
        return (f"takes-{round(10 * self.build_seconds)}", f"fails-on-{self.failing_host}", *missing)


class SimEnvironments:
    """In place of `JobEnvironments`, for one host. A worker that waits for a build in its slot breaks a promise."""

    def __init__(self, world: Any, folder: SimPath) -> None:
        self._world = world
        self._folder = folder

    async def has(self, storage: str, requirements: tuple[str, ...]) -> bool:
        return self._is_there(requirements)

    async def get(self, storage: str, requirements: tuple[str, ...], on_line: "partial[None]") -> Environment:
        if not requirements or self._is_there(requirements):
            return Environment()
        job, worker = on_line.args[:2]
        process = current_process()
        assert process is not None
        if worker is not None:
            self._world.checks.break_promise(f"{job}: worker {worker} waits in its slot for its environment")
        self._world.tell(f"{process.name} builds the environment of {job}")
        values = {name: value for name, _, value in (each.rpartition("-") for each in requirements)}
        await asyncio.sleep(float(values["takes"]) / 10)
        attempts = self._folder / f"attempts-{' '.join(requirements)}"
        with attempts.open("ab") as file:
            file.write(b"x")
        if "is-missing" in requirements:
            raise EnvironmentFailed("no matching distribution found")
        if process.host == f"host-{values['fails-on']}" and len(attempts.read_bytes()) <= 2:
            raise EnvironmentFailed("pip was killed by signal 9", is_hosts_fault=True)
        with self._complete(requirements).open("ab") as file:
            file.write(b"x")
        return Environment()

    def hold(self, environment: Environment) -> AbstractContextManager[object]:
        return nullcontext()

    def _is_there(self, requirements: tuple[str, ...]) -> bool:
        try:
            return bool(self._complete(requirements).read_bytes())
        except FileNotFoundError:
            return False

    def _complete(self, requirements: tuple[str, ...]) -> SimPath:
        return self._folder / " ".join(requirements)
