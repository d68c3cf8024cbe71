"""What of the surroundings is replaced while a world runs: time, randomness, the bus client, and an agent's files."""

import secrets
import types
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import resile_learner.agent.host_templates
import resile_learner.agent.host_workers
import resile_learner.agent.incarnation
import resile_learner.agent.reporting
import resile_learner.agent.service
import resile_learner.processes.runner
import resile_scheduler.lease
import resile_scheduler.service
import resile_shared.bus.connection
import resile_shared.clock
import resile_shared.pool_settings

from .loop import SimTime

TIMED: tuple[ModuleType, ...] = (
    resile_learner.agent.incarnation,
    resile_learner.agent.host_workers,
    resile_scheduler.lease,
    resile_scheduler.service,
    resile_shared.clock,
    resile_shared.pool_settings,
)
"""The modules of services that read a clock."""


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, and restore them at the end: (object, name, value)."""
    before = [(place, name, getattr(place, name)) for place, name, _ in replacements]
    for place, name, value in replacements:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


@contextmanager
def surroundings(world: Any) -> Iterator[None]:
    """Let all services use the time, the bus, the randomness and the hosts of ``world``."""
    time = SimTime(world.loop)
    agent, workers, runner = (
        resile_learner.agent.service,
        resile_learner.agent.host_workers,
        resile_learner.processes.runner,
    )
    defaults = resile_scheduler.lease.Lease.__init__.__kwdefaults__
    with replaced(
        *((module, "time", time) for module in TIMED),
        (resile_scheduler.lease.Lease.__init__, "__kwdefaults__", defaults | {"clock": time.monotonic}),
        (secrets, "token_hex", lambda nbytes=32: world.names.randbytes(nbytes).hex()),
        (resile_shared.bus.connection, "NatsClient", world.client),
        (agent, "ForkServerClient", world.fork_servers),
        (agent, "detect_devices", world.devices),
        (resile_scheduler.service, "Scheduler", world.knowledge.scheduler),
        (resile_learner.agent.incarnation, "AgentCore", world.knowledge.agent),
        (agent, "OwnProcesses", lambda: types.SimpleNamespace(excludes=lambda process: True)),
        (agent, "Packages", Packages),
        (agent, "Environments", lambda folder, variables: folder),
        (agent, "JobEnvironments", world.environments),
        (agent, "Outputs", Outputs),
        (resile_learner.agent.host_templates, "write_private", lambda file, content: file.write_bytes(content)),
        (resile_learner.agent.reporting, "write_private", lambda file, content: file.write_bytes(content)),
        *((module, "find_script", _find_script) for module in (workers, resile_learner.agent.host_templates)),
        (runner, "worker_log", _no_log),
    ):
        yield


class Packages:
    """Every package is there at once."""

    def __init__(self, storage: str, folder: object) -> None:
        pass

    async def unpack(self, key: str, folder: object) -> None:
        pass

    async def unpack_kept(self, key: str, folder: object) -> None:
        pass


class Outputs:
    """Workers write no files."""

    def __init__(self, storage: str) -> None:
        pass

    async def upload(self, job: str, folder: object) -> bool:
        return True

    def take_refused(self, job: str) -> list[str]:
        return []

    def forget(self, job: str) -> None:
        pass


def _find_script(package: Any, script: str) -> Any:
    return package / script


class _NoLog:
    def write(self, line: str) -> None:
        pass


@contextmanager
def _no_log(folder: object, worker: int, *, running: Collection[int]) -> Iterator[_NoLog]:
    yield _NoLog()


class SimPath:
    """A path on the disk of one host, whose files are in memory."""

    def __init__(self, files: dict[str, bytes], path: str) -> None:
        self._files = files
        self._path = path

    def __truediv__(self, name: str) -> "SimPath":
        return SimPath(self._files, f"{self._path}/{name}")

    def __str__(self) -> str:
        return self._path

    def read_bytes(self) -> bytes:
        try:
            return self._files[self._path]
        except KeyError:
            raise FileNotFoundError(self._path) from None

    def write_bytes(self, content: bytes) -> None:
        self._files[self._path] = content

    def unlink(self, *, missing_ok: bool = False) -> None:
        self._files.pop(self._path, None)

    @contextmanager
    def open(self, mode: str) -> "Iterator[_Appending]":
        assert mode == "ab"
        yield _Appending(self._files, self._path)


class _Appending:
    def __init__(self, files: dict[str, bytes], path: str) -> None:
        self._files = files
        self._path = path

    def write(self, data: bytes) -> None:
        self._files[self._path] = self._files.get(self._path, b"") + data


class SimFolder:
    """The folder of an agent, on the disk of its host: it outlives the agent."""

    lock = 0

    def __init__(self) -> None:
        self.path = SimPath({}, "/agent")
        self.packages = self.path / "packages"
        self.environments = self.path / "environments"
        self.datasets = self.path / "datasets"
        self.jobs = self.path / "jobs"
        self.incarnation = 0

    def note_incarnation(self, incarnation: int) -> None:
        self.incarnation = incarnation

    def output(self, job: str) -> SimPath:
        return self.jobs / job / "output"

    def make_output(self, job: str) -> SimPath:
        return self.output(job)

    def code(self, job: str) -> SimPath:
        return self.jobs / job / "code"

    def jobs_with_files(self) -> list[str]:
        return []

    def all_jobs(self) -> list[str]:
        return []

    def drop_files(self, job: str) -> list[SimPath]:
        return []

    def old_jobs(self) -> list[SimPath]:
        return []

    def close(self) -> None:
        pass
