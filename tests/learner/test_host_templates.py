"""The templates of a host: whatever becomes of one is reported, and nothing else of the agent waits for it."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.metrics import NoOpMeter

from resile_learner.agent.events import (
    EndTemplate,
    Event,
    PrepareTemplate,
    TemplateEnded,
    TemplateKept,
    TemplateReady,
    WorkerPrepared,
)
from resile_learner.agent.folder import AgentFolder
from resile_learner.agent.host_templates import HostTemplates, Imports, KeptTemplate, KeptTemplates
from resile_learner.agent.host_workers import WorkerContext
from resile_learner.agent.incarnation import AgentIncarnation
from resile_learner.agent.metrics import AgentMetrics
from resile_learner.agent.packages import Packages
from resile_learner.messages import WorkerConfig
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_learner.processes.fork_servers import ForkServers
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import HEARTBEATS, JOBS
from resile_shared.messages.hosts import Heartbeat, HostHello, Slot
from resile_shared.messages.pool import PoolSettings
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .template_modules import write_modules
from .test_packages import Shop, file

CONFIG = WorkerConfig(job="job-1", worker=0, script="/none.py", directory="/", storage="file:///none")


@pytest_asyncio.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForkServerClient]:
    write_modules(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{tmp_path}")
    settings = ForkServerSettings(entry="acting_workers:main", preload=())
    server = await ForkServerClient.start(log=tmp_path / "log", settings=settings)
    try:
        yield server
    finally:
        await server.close()


def imports(folder: Path, environment: str = "") -> Imports:
    (folder / "script.py").write_text("import harmless_one\n")
    return Imports("code", str(folder / "script.py"), "script.py", str(folder), environment, {})


async def test_a_template_that_no_file_can_be_opened_for_has_ended_and_the_next_one_is_prepared(
    server: ForkServerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_files(*arguments: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    events: list[Event] = []
    templates = HostTemplates(ForkServers(server, ForkServerSettings(), logs=tmp_path), events.append)
    choosing = asyncio.create_task(templates.choose(CONFIG, imports(tmp_path)))
    await until(lambda: events)
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", out_of_files)
        await templates.carry_out(PrepareTemplate(1, "job-1", (), True))
    assert events[1:] == [TemplateEnded(1, "it cannot be started: [Errno 24] Too many open files")]
    assert server.is_idle
    await templates.carry_out(PrepareTemplate(2, "job-1", (), True))
    await until(lambda: events[2:])
    assert isinstance(events[2], TemplateReady)
    choosing.cancel()


async def test_templates_are_prepared_again_by_the_next_incarnation_until_one_is_refused_or_ended(
    server: ForkServerClient, tmp_path: Path
) -> None:
    shop = Shop(tmp_path)
    key = shop.store(file("script.py", b"import harmless_one\n"))
    folder = await AgentFolder.open(tmp_path)
    kept = KeptTemplates(tmp_path / "templates.json")
    servers = ForkServers(server, ForkServerSettings(), logs=tmp_path)

    async def restored() -> list[Event]:
        events: list[Event] = []
        await HostTemplates(servers, events.append, kept).restore(shop.packages, folder)
        return events

    assert await restored() == []
    code = await shop.unpack(key)
    events: list[Event] = []
    templates = HostTemplates(servers, events.append, kept)
    choosing = asyncio.create_task(
        templates.choose(CONFIG, Imports(key, str(code / "script.py"), "script.py", str(code), "", {"A": "b"}))
    )
    await until(lambda: events)
    await templates.carry_out(PrepareTemplate(1, "job-1", (), True))
    await until(lambda: events[1:])
    choosing.cancel()
    (prepared,) = events[:1]
    (again,) = await restored()
    assert isinstance(prepared, WorkerPrepared)
    assert isinstance(again, TemplateKept)
    assert (again.key, again.modules) == (prepared.key, ())
    assert (tmp_path / "templates.json").stat().st_mode & 0o777 == 0o600

    events.clear()
    templates = HostTemplates(servers, events.append, kept)
    await templates.restore(shop.packages, folder)
    await templates.carry_out(PrepareTemplate(2, again.name, ("no_such_module",), True))
    await until(lambda: events[1:])
    assert isinstance(events[1], TemplateEnded)
    assert await restored() == [again], "the first one was not refused"
    await templates.carry_out(PrepareTemplate(3, again.name, (), True))
    await until(lambda: events[2:])
    await templates.carry_out(EndTemplate(3))
    assert await restored() == []
    os.close(folder.lock)


async def test_a_template_whose_package_is_not_here_is_forgotten(server: ForkServerClient, tmp_path: Path) -> None:
    folder = await AgentFolder.open(tmp_path)
    kept = KeptTemplates(tmp_path / "templates.json")
    kept.add(
        KeptTemplate(key="k", code="packages/gone.tar.gz", script="a.py", environment="", variables={}, modules=())
    )
    events: list[Event] = []
    servers = ForkServers(server, ForkServerSettings(), logs=tmp_path)
    await HostTemplates(servers, events.append, kept).restore(Packages("file:///none", folder.packages), folder)
    assert events == []
    assert kept.read() == ()
    os.close(folder.lock)


async def test_a_template_that_is_prepared_while_the_host_ends_is_kept_for_the_next_incarnation(
    server: ForkServerClient, tmp_path: Path
) -> None:
    wanted = imports(tmp_path, "/environment")
    template = KeptTemplate(
        key=wanted.key, code=wanted.code, script=wanted.name, environment="/environment", variables={}, modules=()
    )
    kept = KeptTemplates(tmp_path / "templates.json")
    kept.add(template)
    servers = ForkServers(server, ForkServerSettings(), logs=tmp_path)
    await servers.close()
    events: list[Event] = []
    templates = HostTemplates(servers, events.append, kept)
    choosing = asyncio.create_task(templates.choose(CONFIG, wanted))
    await until(lambda: events)
    await templates.carry_out(PrepareTemplate(1, "job-1", (), True))
    assert events[1:] == [TemplateEnded(1, "this host ends its workers")]
    assert kept.read() == (template,)
    choosing.cancel()


def test_a_file_of_templates_that_cannot_be_read_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "templates.json").write_text("{")
    assert KeptTemplates(tmp_path / "templates.json").read() == ()


class SlowForkServers:
    """Of which one never starts."""

    def __init__(self, own: ForkServerClient) -> None:
        self.own = own
        self.asked = asyncio.Event()

    async def get(self, environment: str) -> ForkServerClient:
        self.asked.set()
        await asyncio.Event().wait()
        return self.own


async def test_heartbeats_go_on_while_a_template_waits_for_its_fork_server(
    pool: Pool, server: ForkServerClient, tmp_path: Path
) -> None:
    await pool.bus("registry")
    await pool.bus("scheduler")
    bus, monitor = await pool.bus("learner"), await pool.bus("monitor")
    beats: list[Heartbeat] = []

    async def beat(received: Received[Heartbeat]) -> None:
        beats.append(received.message)

    await monitor.subscribe(HEARTBEATS, Heartbeat, beat)
    unused: Any = None
    settings = PoolSettings(detection_seconds=3.0)
    folder = await AgentFolder.open(tmp_path / "agent")
    context = WorkerContext(
        "host-1",
        folder,
        "file:///none",
        "127.0.0.1",
        (),
        unused,
        unused,
        unused,
        unused,
        unused,
        bus.bucket(JOBS),
        settings,
    )
    servers: Any = SlowForkServers(server)
    hello = HostHello(host="host-1", incarnation=1, address="127.0.0.1", slots=(Slot(index=0),), device_class="cpu")
    incarnation = AgentIncarnation(bus, hello, context, servers, AgentMetrics(NoOpMeter("resile")))
    running = asyncio.create_task(incarnation.run())
    choosing = asyncio.create_task(incarnation._templates.choose(CONFIG, imports(tmp_path, "/environment")))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await servers.asked.wait()
        num_beats = len(beats)
        await until(lambda: len(beats) > num_beats + 1 or running.done())
    assert not running.done()
    for task in (running, choosing):
        task.cancel()
    await asyncio.wait({running, choosing})
    os.close(folder.lock)
