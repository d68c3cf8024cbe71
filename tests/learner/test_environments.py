"""Environments: built once, whole or not at all, over the pool's packages, and kept while they are used."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from resile_learner import environments as module
from resile_learner.agent.job_environments import JobEnvironments
from resile_learner.environments import Environment, EnvironmentFailed, Environments, in_use
from resile_testing.waiting import PATIENCE_SECONDS, block_until, until

from .wheels import add_slow_source, add_source_with_daemon, add_wheel, offline

pytestmark = pytest.mark.long


class Host:
    """A host's environments, and the wheels that its pip finds."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.folder = folder / "environments"
        self.lines: list[str] = []
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        variables = {**os.environ, **offline(self.wheels), "TMPDIR": str(self.temporary)}
        self.environments = Environments(self.folder, variables=variables)

    async def get(self, *requirements: str, pins: str = "") -> Environment:
        return await self.environments.get(requirements, self.lines.append, pins=pins)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def imported(environment: Environment, code: str) -> str:
    """Run Python code in an environment; return what it prints."""
    command = [f"{environment.folder}/bin/python", "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def test_the_packages_of_a_job_come_before_those_of_the_pool(host: Host) -> None:
    add_wheel(host.wheels, "marker", "1.5")
    add_wheel(host.wheels, "filelock", "99.0")
    environment = await host.get("marker>=1", "filelock==99.0", "numpy")
    assert environment.packages == "filelock==99.0 marker==1.5"
    seen = "import filelock, marker, resile_learner; print(filelock.version, marker.version, resile_learner.__file__)"
    assert imported(environment, seen) == f"99.0 1.5 {Path(module.__file__).with_name('__init__.py')}"
    assert any("Successfully installed" in line for line in host.lines)


@pytest.mark.nightly
async def test_two_environments_have_conflicting_versions(host: Host) -> None:
    for version in ("1.0", "2.0"):
        add_wheel(host.wheels, "marker", version)
    one, two = await asyncio.gather(host.get("marker<2"), host.get("marker>=2"))
    assert [imported(each, "import marker; print(marker.version)") for each in (one, two)] == ["1.0", "2.0"]


async def test_an_environment_is_on_the_disk_before_it_counts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    add_wheel(host.wheels, "marker", "1.0")
    found: list[list[str]] = []
    sync = os.sync

    def record() -> None:
        found.append(sorted(path.name for path in host.folder.glob("*/*")))
        sync()

    monkeypatch.setattr(os, "sync", record)
    environment = await host.get("marker")
    (at_the_sync,) = found
    assert {"draft", "lib"} <= set(at_the_sync)
    assert "complete" not in at_the_sync
    assert Path(environment.folder, "complete").is_file()


async def test_an_environment_is_built_once_for_all_who_ask(host: Host) -> None:
    add_wheel(host.wheels, "marker", "1.0")
    first = await asyncio.gather(host.get("marker"), host.get("marker"))
    built = len(host.lines)
    assert first[0] == first[1] == await host.get("marker")
    assert len(host.lines) == built


async def test_a_job_without_requirements_runs_in_the_environment_of_the_pool(host: Host) -> None:
    assert await host.get() == Environment()
    assert not host.folder.exists()


async def test_a_package_that_is_not_there_is_named(host: Host) -> None:
    host.wheels.mkdir()
    with pytest.raises(
        EnvironmentFailed, match="Could not find a version that satisfies the requirement missing"
    ) as error:
        await host.get("missing")
    assert not error.value.is_hosts_fault
    assert not list(host.folder.glob("*/"))


async def test_another_torch_is_refused_before_anything_is_installed(host: Host) -> None:
    with pytest.raises(EnvironmentFailed, match=r"it requires torch==1\.0, and torch stays that of the pool"):
        await host.get("torch==1.0")
    assert not host.lines


async def test_a_build_that_was_cancelled_leaves_nothing_and_is_begun_again(host: Host, tmp_path: Path) -> None:
    add_slow_source(host.wheels, "slow", started=tmp_path / "started")
    building = asyncio.create_task(host.get("slow"))
    await until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text())
    pid = int((tmp_path / "started").read_text())
    await host.environments.close()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert not psutil.pid_exists(pid)
    assert list(host.temporary.iterdir()) == list(host.folder.glob("*/")) == []
    await _built_after_all(host)


BUILDER = """
import asyncio, pathlib, os, sys
from resile_learner.environments import Environments
asyncio.run(Environments(pathlib.Path(sys.argv[1]), variables=os.environ).get(["slow"], print))
"""


async def test_a_build_whose_process_was_killed_is_begun_again(host: Host, tmp_path: Path) -> None:
    add_slow_source(host.wheels, "slow", started=tmp_path / "started")
    command = [sys.executable, "-c", BUILDER, str(host.folder)]
    variables = {**os.environ, **offline(host.wheels)}
    builder = await asyncio.create_subprocess_exec(*command, env=variables, stdout=subprocess.DEVNULL)
    await until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text())
    builder.kill()
    await builder.wait()
    pid = int((tmp_path / "started").read_text())
    await until(lambda: not psutil.pid_exists(pid))
    add_wheel(host.wheels, "marker", "1.0")
    environment = await host.get("marker")
    assert list(host.folder.glob("*/")) == [Path(environment.folder)], "the interrupted one is removed"
    await _built_after_all(host)


@pytest.mark.nightly
async def test_what_a_build_has_started_ends_with_it(host: Host, tmp_path: Path) -> None:
    add_wheel(tmp_path / "built", "server", "1.0")
    add_source_with_daemon(host.wheels, "server", started=tmp_path / "started")
    async with asyncio.timeout(PATIENCE_SECONDS):
        environment = await host.get("server")
    assert not psutil.pid_exists(int((tmp_path / "started").read_text()))
    assert imported(environment, "import server; print(server.version)") == "1.0"


async def _built_after_all(host: Host) -> None:
    (host.wheels / "slow-1.0.tar.gz").unlink()
    add_wheel(host.wheels, "slow", "1.0")
    assert imported(await host.get("slow"), "import slow; print(slow.version)") == "1.0"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "environments"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
async def test_a_full_disk_is_the_fault_of_the_host_and_nothing_stays(host: Host, small_disk: Path) -> None:
    add_wheel(host.wheels, "marker", "1.0", num_bytes=20_000_000)
    with pytest.raises(EnvironmentFailed, match="no space is left") as error:
        await host.get("marker")
    assert error.value.is_hosts_fault
    assert not list(small_disk.glob("*/"))


@pytest.mark.nightly
async def test_the_least_recently_used_are_removed_unless_they_are_in_use(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_ENVIRONMENTS", 1)
    for name in ("one", "two", "three"):
        add_wheel(host.wheels, name, "1.0")
    one = await host.get("one")
    with in_use(Path(one.folder)):
        two = await host.get("two")
        assert Path(one.folder).exists()
    three = await host.get("three")
    assert [Path(each.folder).exists() for each in (one, two, three)] == [False, False, True]
    name = Path(three.folder).name
    assert {path.name for path in host.folder.iterdir()} == {name, f"{name}.lock"}


@pytest.mark.nightly
async def test_environments_that_another_process_removes_meanwhile_fail_no_build(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both list the same ones; the second found them gone, and its build, which was complete, failed."""
    for name in ("one", "two", "three"):
        add_wheel(host.wheels, name, "1.0")
    one, two = await host.get("one"), await host.get("two")
    remove_unused = module.remove_unused

    def remove_first(folder: Path, remove: Callable[[], None]) -> bool:
        remove_unused(folder, remove)
        return remove_unused(folder, remove)

    monkeypatch.setattr(module, "KEEP_ENVIRONMENTS", 1)
    monkeypatch.setattr(module, "remove_unused", remove_first)
    three = await host.get("three")
    assert [Path(each.folder).exists() for each in (one, two, three)] == [False, False, True]


@pytest.mark.nightly
async def test_an_environment_that_is_used_before_its_lock_is_free_is_not_removed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        add_wheel(host.wheels, name, "1.0")
    one = await host.get("one")
    remove_unused = module.remove_unused

    def use_first(folder: Path, remove: Callable[[], None]) -> bool:
        os.utime(folder / "complete")
        return remove_unused(folder, remove)

    monkeypatch.setattr(module, "KEEP_ENVIRONMENTS", 1)
    monkeypatch.setattr(module, "remove_unused", use_first)
    await host.get("two")
    assert Path(one.folder).exists()


async def test_all_hosts_install_the_versions_of_the_first(tmp_path: Path) -> None:
    hosts = [Host(tmp_path / name) for name in ("first", "second")]
    add_wheel(hosts[0].wheels, "marker", "1.0")
    for version in ("1.0", "1.1"):
        add_wheel(hosts[1].wheels, "marker", version)
    storage = (tmp_path / "job").as_uri()
    packages = []
    for host in hosts:
        environment = await JobEnvironments(host.environments).get(storage, ["marker"], host.lines.append)
        packages.append(environment.packages)
    assert packages == ["marker==1.0", "marker==1.0"]
    assert (await hosts[1].get("marker")).packages == "marker==1.1"


async def test_a_build_stays_cancelled_when_its_command_exits_meanwhile(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "python"
    command.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    pids: asyncio.Queue[int] = asyncio.Queue()
    build = asyncio.create_task(
        host.environments._open("key", module.Wanted(("marker",)), lambda line: pids.put_nowait(int(line)))
    )
    pid = await pids.get()
    build.cancel()
    os.kill(pid, signal.SIGKILL)
    block_until(
        lambda: not psutil.pid_exists(pid)
    )  # by the thread that waits for it; the event loop is not notified yet
    with pytest.raises(asyncio.CancelledError):
        await build
