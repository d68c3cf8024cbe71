"""What keeps a pool's processes alive."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from resile.pool import disk
from resile.pool.home import PoolHome
from resile.pool.process import ServiceFailed, ServiceProcess, describe_exit, last_line
from resile.pool.services import PoolOptions, ServiceSpec
from resile.pool.supervisor import Supervisor, keep_running
from resile_shared import version
from resile_shared.version import VERSION, VersionMismatch
from resile_testing.fixtures import Pool


def spec(folder: Path, pool: Pool, *arguments: str) -> ServiceSpec:
    """The registry, as a service to try."""
    health = folder / "health"
    credentials = ("--credentials", str(pool.server.credentials("registry")))
    flags = (*credentials, "--health-port", "0", "--health-file", str(health), *arguments)
    return ServiceSpec("registry", "resile_registry", flags, folder / "registry.log", health)


async def test_a_service_is_started_until_it_is_ready_and_ends_when_told(tmp_path: Path, pool: Pool) -> None:
    process = ServiceProcess(spec(tmp_path, pool))
    await process.start()
    await process.stop()
    assert await process.wait() == 0
    await process.stop()


async def test_a_service_that_cannot_start_says_why(tmp_path: Path, pool: Pool) -> None:
    process = ServiceProcess(spec(tmp_path, pool, "--detection-seconds", "0"))
    with pytest.raises(
        ServiceFailed, match=r"registry exited status=2 before it was ready: .*detection-seconds.*its log"
    ):
        await process.start()


async def test_a_service_that_cannot_write_why_it_ended_has_a_full_disk(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = replace(spec(tmp_path, pool), prefix=("false",))
    with pytest.raises(ServiceFailed, match=r"registry exited status=1 before it was ready \(its log"):
        await ServiceProcess(silent).start()
    monkeypatch.setattr(disk, "LEAST_FREE_BYTES", 1 << 60)
    with pytest.raises(
        ServiceFailed, match=r"registry exited status=1 before it was ready: the disk of .* is full \(its log"
    ):
        await ServiceProcess(silent).start()


@pytest.mark.parametrize(
    "end", ["import os; os.abort()", 'raise RuntimeError("can\'t start new thread")'], ids=["libuv", "Python"]
)
async def test_a_service_that_cannot_start_a_thread_says_so(tmp_path: Path, pool: Pool, end: str) -> None:
    ending = replace(spec(tmp_path, pool), prefix=(sys.executable, "-c", end))
    with pytest.raises(ServiceFailed, match=r"registry exited .* before it was ready: no thread .*ulimit -u"):
        await ServiceProcess(ending).start()


async def test_after_an_upgrade_under_a_pool_no_service_of_the_new_version_is_started(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would refuse all hosts of the pool, whose jobs train on without it."""
    told: asyncio.Queue[str] = asyncio.Queue()
    process = ServiceProcess(spec(tmp_path, pool))
    await process.start()
    keeping = asyncio.create_task(keep_running(process, "registry", told.put_nowait))
    try:
        monkeypatch.setattr(version, "VERSION", "0.0.1")
        await process.kill()
        await told.get()
        advice = "install 0.0.1 again, or stop what runs and start it again"
        for pause in ("0.4", "0.8"):
            assert await told.get() == (
                f"registry not restarted: {VERSION} of Resile is installed now, but 0.0.1 runs: {advice}: "
                f"trying again in {pause} s"
            )
    finally:
        keeping.cancel()
        await process.stop()


async def test_what_dies_is_started_again_and_said_to_be_back(tmp_path: Path, pool: Pool) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    process = ServiceProcess(spec(tmp_path, pool))
    await process.start()
    keeping = asyncio.create_task(keep_running(process, "registry", told.put_nowait))
    try:
        for pause in ("0.2", "0.4"):
            await process.kill()
            assert await told.get() == f"registry exited signal=SIGKILL, restarting in {pause} s"
            assert await told.get() == "registry restarted"
    finally:
        keeping.cancel()
        await process.stop()


AFTER_THE_REGISTRY = """
import os, sys, urllib.request
with open(sys.argv[1]) as file:
    urllib.request.urlopen(file.read() + "/readyz", timeout=60)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Fails unless the registry is ready; what it fails before is not started."""


async def test_what_loads_the_settings_of_a_pool_is_started_when_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a registry that starts late leaves them to be compared with those of the last `resile up`."""
    home, started = PoolHome(tmp_path), asyncio.Event()
    pool = Supervisor(home, PoolOptions(slots=1), log=print)
    prefix = (sys.executable, "-c", AFTER_THE_REGISTRY, str(home.health("registry")))
    scheduler = replace(pool._specs.scheduler(is_first=True), prefix=prefix)
    agents = [replace(agent, prefix=prefix) for agent in pool._specs.agents()]
    monkeypatch.setattr(pool._specs, "scheduler", lambda **_: scheduler)
    monkeypatch.setattr(pool._specs, "agents", lambda: agents)
    running = asyncio.create_task(pool.run(lambda url: started.set()))
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    running.cancel()
    await asyncio.wait({running})
    home.close()
    assert running.exception() is None
    assert started.is_set()


class Upgraded:
    """The agent of a pool that was upgraded."""

    async def start(self) -> None:
        raise VersionMismatch(pool="9.9.9")

    async def wait(self) -> int:
        return 1

    async def stop(self) -> None:
        raise AssertionError("it does not run")


async def test_a_host_whose_pool_was_upgraded_is_not_started_again_and_again() -> None:
    told: list[str] = []
    with pytest.raises(VersionMismatch, match=r"its pool runs Resile 9\.9\.9"):
        await keep_running(Upgraded(), "far", told.append)
    assert told == ["far exited status=1, restarting in 0.2 s"]


def test_the_end_of_a_process_is_told_in_words(tmp_path: Path) -> None:
    assert describe_exit(2) == "exited status=2"
    assert describe_exit(-9) == "exited signal=SIGKILL"
    assert describe_exit(-40) == "exited signal=40"
    assert last_line(tmp_path / "none") == ""
