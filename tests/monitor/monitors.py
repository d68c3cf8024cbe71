"""Monitors as processes, what talks to them, and a scene for them to look at."""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
import pytest_asyncio
from pydantic import BaseModel

from resile_shared.bus.client import Bus
from resile_shared.bus.subjects import HOSTS, JOBS
from resile_shared.http.api import Problem
from resile_shared.messages.hosts import HostRecord
from resile_shared.messages.jobs import JobRecord
from resile_shared.storage.objects import ObjectStorage
from resile_testing.fixtures import Pool

M = TypeVar("M", bound=BaseModel)
TOKEN = "a-token-for-tests-alone"
START_SECONDS = 90
"""In which a monitor is up, on a busy machine."""


@dataclass
class Event:
    """One server-sent event."""

    id: str
    data: dict[str, Any]


class Monitor:
    """One monitor process, and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, *, token: str = TOKEN) -> None:
        self.process = process
        self.url = url
        self.http = aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {token}"} if token else {})

    async def get(self, path: str, model: type[M]) -> M:
        async with self.http.get(path) as answer:
            assert answer.status == 200, await answer.text()
            return model.model_validate_json(await answer.read())

    async def post(self, path: str, body: object = None, **options: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, **options) as answer:
            return answer.status, await answer.json()

    async def problem(self, method: str, path: str, **options: Any) -> Problem:
        async with self.http.request(method, path, **options) as answer:
            assert answer.content_type == "application/problem+json", await answer.text()
            problem = Problem.model_validate_json(await answer.read())
            assert problem.status == answer.status
            assert "\n" not in problem.detail
            return problem

    async def events(self, path: str, *, last: str | None = None) -> AsyncGenerator[Event, None]:
        headers = {"Last-Event-ID": last} if last else {}
        async with self.http.get(path, headers=headers, timeout=aiohttp.ClientTimeout()) as answer:
            assert answer.status == 200, await answer.text()
            name = ""
            async for line in answer.content:
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "id":
                    name = value
                elif field == "data":
                    yield Event(name, orjson.loads(value))

    async def answers(self, path: str, status: int) -> None:
        """Wait until it does."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                async with self.http.get(path) as answer:
                    if answer.status == status:
                        return
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        await self.http.close()
        await end(self.process)


class Monitors:
    """Starts monitors."""

    def __init__(self, pool: Pool, folder: Path, stack: AsyncExitStack) -> None:
        self.pool = pool
        self.folder = folder
        self.storage = ObjectStorage((folder / "storage").as_uri())
        self._stack = stack
        self._num = 0

    async def start(
        self, *flags: str, port: int = 0, waits: bool = True, token: str = TOKEN, **options: Any
    ) -> Monitor:
        self._num += 1
        file = self.folder / f"url-{self._num}"
        guard = ("--token-file", str(self._token_file(token))) if token else ()
        process = await self.process("--api-port", str(port), "--url-file", str(file), *guard, *flags, **options)
        async with asyncio.timeout(START_SECONDS):
            while not file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        monitor = Monitor(process, file.read_text(), token=token)
        self._stack.push_async_callback(monitor.kill)
        if waits:
            await monitor.answers("/readyz", 200)
        return monitor

    def _token_file(self, token: str) -> Path:
        file = self.folder / "token"
        file.write_text(token)
        return file

    async def process(self, *flags: str, **options: Any) -> asyncio.subprocess.Process:
        common = ("--credentials", str(self.pool.server.credentials("monitor")), "--storage", self.storage.url)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "resile_monitor", *common, *flags, **options
        )
        self._stack.push_async_callback(end, process)
        return process


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process, also one that was never ready."""
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest_asyncio.fixture
async def monitors(pool: Pool, tmp_path: Path) -> AsyncIterator[Monitors]:
    async with AsyncExitStack() as stack:
        yield Monitors(pool, tmp_path, stack)


class Scene:
    """Scheduler, registry and learner, as far as a monitor sees them."""

    def __init__(self, scheduler: Bus, registry: Bus, learner: Bus) -> None:
        self.scheduler = scheduler
        self.registry = registry
        self.learner = learner
        self._revisions: dict[str, int] = {}

    async def store_job(self, record: JobRecord) -> None:
        jobs = self.scheduler.bucket(JOBS)
        revision = self._revisions.get(record.job, 0)
        self._revisions[record.job] = await jobs.update(record.job, record, revision=revision)

    async def store_host(self, record: HostRecord) -> None:
        hosts = self.registry.bucket(HOSTS)
        revision = self._revisions.get(record.host, 0)
        self._revisions[record.host] = await hosts.update(record.host, record, revision=revision)


@pytest_asyncio.fixture
async def scene(pool: Pool) -> Scene:
    scheduler, registry = await pool.bus("scheduler"), await pool.bus("registry")
    return Scene(scheduler, registry, await pool.bus("learner"))
