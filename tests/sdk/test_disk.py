"""A disk that takes no writes is noticed by writing, and named with its reason."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resile.pool import disk
from resile.pool.disk import watch_disk, write_fault
from resile_shared.bus.nats_server import NatsServer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_takes_writes_has_no_fault_and_keeps_nothing(tmp_path: Path) -> None:
    assert write_fault(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


@needs_root
@pytest.mark.parametrize(
    ("mounted", "fault"),
    [
        ("size=512k", "the disk of {} is full"),
        ("size=8m", "the disk of {} is full"),  # less than is needed
        ("size=32m,nr_inodes=1", "the disk of {} is full: it has no inodes left"),
        ("size=32m,ro", "the disk of {} is read-only"),
    ],
    indirect=["mounted"],
)
def test_a_disk_that_takes_no_writes_is_named_with_the_reason(mounted: Path, fault: str) -> None:
    assert write_fault(mounted) == fault.format(mounted)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    assert write_fault(tmp_path / "gone") == f"{tmp_path / 'gone'} cannot be written: No such file or directory"


async def test_a_disk_that_does_not_answer_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def hang(_: Path) -> str:
        answers.wait()
        return ""

    monkeypatch.setattr(disk, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(disk, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(disk, "write_fault", hang)
    logged: asyncio.Queue[str] = asyncio.Queue()
    watching = asyncio.create_task(watch_disk(NatsServer(tmp_path), logged.put_nowait))
    line = await logged.get()
    assert line.startswith(f"the disk of {tmp_path} has not answered for 0.01 s: running jobs train on")
    answers.set()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    assert logged.empty()
