"""Fork servers of environments: idle ones are closed, beyond a few, and never one that somebody uses."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from resile_learner.messages import WorkerConfig
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_learner.processes.fork_protocol import TemplateContent, TemplateExited, TemplateLoaded
from resile_learner.processes.fork_servers import KEEP_IDLE, ForkServers, ForkServersClosed
from resile_testing.waiting import PATIENCE_SECONDS, until

from .template_modules import write_modules

Report = TemplateLoaded | TemplateExited


class Host:
    """The fork servers of a host with as many environments as a test names."""

    def __init__(self, servers: ForkServers, folder: Path) -> None:
        self.servers = servers
        self.folder = folder

    async def get(self, number: int) -> ForkServerClient:
        environment = self.folder / f"environment-{number}"
        python = environment / "bin/python"
        if not python.exists():
            python.parent.mkdir(parents=True)
            python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            python.chmod(0o755)
        return await self.servers.get(str(environment))

    async def prepare(self, server: ForkServerClient) -> list[Report]:
        """Ask for a template; return the list of what it will report."""
        (self.folder / "script.py").write_text("import harmless_one\n")
        content = TemplateContent(script=str(self.folder / "script.py"), directory=str(self.folder))
        reports: list[Report] = []
        await server.prepare_template(1, content, reports.append)
        return reports

    async def run(self, server: ForkServerClient) -> str:
        """Run a worker to its end; return how it ended."""
        config = WorkerConfig(
            job="j",
            worker=0,
            script="/none.py",
            args=("finishes",),
            directory=str(self.folder),
            storage="file:///none",
        )
        worker = await server.fork(config, lambda stream, line: None)
        async for _ in worker.messages():
            pass
        return (await worker.wait()).kind


@pytest_asyncio.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    modules = tmp_path / "modules"
    modules.mkdir()
    write_modules(modules)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{modules}")
    settings = ForkServerSettings(entry="acting_workers:main", preload=())
    own = await ForkServerClient.start(log=tmp_path / "log", settings=settings)
    servers = ForkServers(own, settings, logs=tmp_path)
    try:
        yield Host(servers, tmp_path)
    finally:
        await servers.close()
        await own.close()


async def test_the_least_recently_used_that_nobody_uses_is_closed(host: Host) -> None:
    used = [await host.get(number) for number in range(KEEP_IDLE)]
    assert await host.get(0) is used[0]
    await host.get(KEEP_IDLE)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await used[1].ended()
    assert await host.get(0) is used[0]
    assert await host.get(1) is not used[1]


async def test_a_log_that_is_truncated_while_it_is_written_begins_with_what_comes_then(host: Host) -> None:
    server = await host.get(0)
    log = host.folder / "fork-server-environment-0.log"
    reports: list[Report] = []

    def reached(number: int) -> bool:
        return len(reports) == number

    for number, text in enumerate(("one", "two"), start=1):
        (host.folder / f"modules/says_{text}.py").write_text(f"print('{text}', flush=True)\n")
        script = host.folder / f"{text}.py"
        script.write_text(f"import says_{text}\n")
        content = TemplateContent(script=str(script), directory=str(host.folder))
        os.truncate(log, 0)
        await server.prepare_template(number, content, reports.append)
        await until(partial(reached, number))
    assert log.read_text() == "two\n"


async def test_of_environments_that_are_gone_no_logs_stay(host: Host) -> None:
    for name in ("fork-server-gone.log", "fork-server-gone.log.old", "fork-server.log"):
        (host.folder / name).touch()
    await host.get(0)
    await host.get(1)
    left = sorted(path.name for path in host.folder.glob("fork-server*"))
    assert left == ["fork-server-environment-0.log", "fork-server-environment-1.log", "fork-server.log"]


async def test_a_fork_server_with_a_template_is_in_use(host: Host) -> None:
    used = [await host.get(number) for number in range(2)]
    reports = await host.prepare(used[0])
    for number in range(2, KEEP_IDLE + 2):
        await host.get(number)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await used[1].ended()
    assert await host.get(0) is used[0]
    assert not any(isinstance(report, TemplateExited) for report in reports)


async def test_a_fork_server_of_which_a_worker_is_being_requested_is_in_use(host: Host) -> None:
    requested = await host.get(0)
    running = asyncio.create_task(host.run(requested))
    await asyncio.sleep(0)  # the worker's socket is being connected
    for number in range(1, KEEP_IDLE + 1):
        await host.get(number)
    assert await running == "finished"


async def test_nobody_waits_for_an_idle_fork_server_to_be_closed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited would have a fork server in hand that others find idle, and close."""
    may_close = asyncio.Event()
    close = ForkServerClient.close

    async def close_slowly(server: ForkServerClient) -> None:
        await may_close.wait()
        await close(server)

    monkeypatch.setattr(ForkServerClient, "close", close_slowly)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            servers = [await host.get(number) for number in range(KEEP_IDLE + 1)]
            again = await host.get(0)
    finally:
        may_close.set()
    assert again is not servers[0], "that one is being closed"
    assert await host.run(again) == "finished"


async def test_none_is_started_once_they_are_closed(host: Host) -> None:
    """Nobody would have ended it, in its own session."""
    started = await host.get(0)
    closing = asyncio.create_task(host.servers.close())
    await asyncio.sleep(0)
    for number in range(2):
        with pytest.raises(ForkServersClosed):
            await host.get(number)
    await closing
    with pytest.raises(ForkServersClosed):
        await host.get(0)
    await started.ended()
