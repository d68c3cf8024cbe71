"""The monitor crashes before and after each request that it sends: a client that retries notices nothing."""

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import resile_scheduler.service
from resile.client import AsyncClient
from resile.http_requests import Server
from resile.package import pack
from resile_scheduler.settings import SchedulerSettings
from resile_shared.bus.nats_server import NatsServer
from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.pool import PoolSettings
from resile_shared.pool_settings import store_pool_settings
from resile_shared.version import VERSION
from resile_testing.crash_points import CrashableService, Forker, Outcome, crash_at
from resile_testing.crashable import Point
from resile_testing.fixtures import Pool
from resile_testing.services import in_process

SECONDS = 60.0


async def play(forker: Forker, folder: Path, fatal: Point | None) -> Outcome:
    """A package is uploaded, a job is submitted, gets a priority and is stopped, while somebody follows its events."""
    async with AsyncExitStack() as stack:
        server = NatsServer(folder / "bus")
        await server.start()
        stack.push_async_callback(server.stop)
        pool = Pool(server, await stack.enter_async_context(AsyncExitStack()))
        await store_pool_settings(await pool.bus("registry"), PoolSettings(detection_seconds=3.0, version=VERSION))
        await stack.enter_async_context(in_process(pool, "scheduler", resile_scheduler.service.run, SchedulerSettings))
        (folder / "storage").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        flags = ("--credentials", str(server.credentials("monitor")), "--log-level", "error")
        api = ("--storage", (folder / "storage").as_uri(), "--api-port", port)
        service = CrashableService(forker, *flags, *api, fatal=fatal, log=folder / "points")
        await stack.enter_async_context(service.running())
        address = Server(f"http://127.0.0.1:{port}", "", is_supervised=True)
        client = await stack.enter_async_context(AsyncClient(address))
        script = folder / "train.py"
        script.write_text("")
        async with asyncio.timeout(SECONDS):
            result = await act(client, script)
        return Outcome(result, service.points, len(service.ends))


async def act(client: AsyncClient, script: Path) -> object:
    """Return what there is in the end, and what a reader of its events saw."""
    package = pack(script)
    key = await client.upload(package.content)
    job = await client.submit(JobSpec(name="train", package=key, script=package.script))
    seen = asyncio.create_task(events(client, job))
    await client.set_priority(job, 7000)
    await client.stop(job, reason="enough")
    views = [(view.id, view.state, view.priority) for view in await client.jobs()]
    return views, await seen


async def events(client: AsyncClient, job: str) -> list[tuple[int, str]]:
    """Return the job's history as its events tell it, up to its end."""
    found: list[tuple[int, str]] = []
    async for event in client.follow_events(job=job, tail=1000):
        item = event.data["item"]
        found.append((item["number"], item["kind"]))
        if item["kind"] == "stopped":
            break
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    return found


async def test_a_crash_at_any_point_changes_nothing(tmp_path: Path) -> None:
    await crash_at("monitor", play, tmp_path)
