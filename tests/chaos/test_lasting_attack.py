"""A lasting attack is undone, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from resile.chaos.attacks import AttackKind
from resile.chaos.lasting_attack import OTHER_DESCRIPTORS, SPARE_FILES, LastingAttack
from resile_testing.waiting import PATIENCE_SECONDS

FOR_EVER = 3600.0
IS_SLEEPING = (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def holding(lasting: LastingAttack) -> list[str]:
    return [sys.executable, "-P", "-m", "resile.chaos.lasting_attack", lasting.model_dump_json()]


def begun(process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def state(pid: int) -> str:
    return str(psutil.Process(pid).status())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_is_frozen_goes_on_when_its_time_is_over(start: Start) -> None:
    victim = start("sleep", "100")
    holder = begun(start(*holding(LastingAttack(kind=AttackKind.FREEZE, seconds=0.2, processes=(victim.pid,)))))
    assert holder.wait(120) == 0
    until(lambda: state(victim.pid) in IS_SLEEPING)


def test_what_is_frozen_goes_on_when_whoever_froze_it_is_killed(start: Start) -> None:
    victim = start("sleep", "100")
    command = holding(LastingAttack(kind=AttackKind.FREEZE, seconds=FOR_EVER, processes=(victim.pid,)))
    script = f"import subprocess, time; subprocess.Popen({command!r}, stdin=subprocess.PIPE); time.sleep(100)"
    owner = begun(start(sys.executable, "-c", script))
    until(lambda: state(victim.pid) == psutil.STATUS_STOPPED)
    owner.kill()
    until(lambda: state(victim.pid) in IS_SLEEPING)


def test_a_host_is_frozen_with_all_that_it_started(start: Start) -> None:
    shell = begun(start("sh", "-c", "sleep 100 & echo begun; wait"))
    holder = begun(
        start(
            *holding(
                LastingAttack(kind=AttackKind.FREEZE, seconds=FOR_EVER, processes=(shell.pid,), with_descendants=True)
            )
        )
    )
    family = [shell.pid, *(child.pid for child in psutil.Process(shell.pid).children())]
    until(lambda: [state(pid) for pid in family] == 2 * [psutil.STATUS_STOPPED])
    holder.communicate()
    until(lambda: all(state(pid) in IS_SLEEPING for pid in family))
    for pid in family[1:]:
        os.kill(pid, 9)


def test_what_is_slowed_runs_now_and_then(start: Start) -> None:
    victim = start("sleep", "100")
    holder = begun(start(*holding(LastingAttack(kind=AttackKind.SLOW, seconds=FOR_EVER, processes=(victim.pid,)))))
    for _ in range(3):
        until(lambda: state(victim.pid) == psutil.STATUS_STOPPED)
        until(lambda: state(victim.pid) in IS_SLEEPING)
    holder.communicate()
    until(lambda: state(victim.pid) in IS_SLEEPING)


def test_a_process_that_is_gone_is_no_fault(start: Start) -> None:
    gone = start("true")
    gone.wait(120)
    holder = begun(start(*holding(LastingAttack(kind=AttackKind.FREEZE, seconds=0.01, processes=(gone.pid,)))))
    assert holder.wait(120) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_the_ballast_is_gone_with_the_attack(start: Start, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    holder = begun(start(*holding(LastingAttack(kind=AttackKind.DISK_FULL, seconds=FOR_EVER, ballast=ballast))))
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "file").write_bytes(bytes(100_000))
    holder.communicate()
    assert not ballast.exists()


def test_what_was_hidden_is_there_again_with_what_was_stored_meanwhile(start: Start, tmp_path: Path) -> None:
    victim = start("sleep", "100")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "old").write_text("old")
    lasting = LastingAttack(kind=AttackKind.UNMOUNT, seconds=FOR_EVER, processes=(victim.pid,), folder=folder)
    holder = begun(start(*holding(lasting)))
    assert victim.wait(120) == -signal.SIGKILL
    assert not folder.exists()
    folder.mkdir()
    (folder / "new").write_text("new")
    holder.terminate()
    assert holder.wait(120) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "new", "old"]


def test_a_process_may_open_as_many_files_as_before_when_its_limit_is_over(start: Start) -> None:
    victim = psutil.Process(start("sleep", "100").pid)
    before = victim.rlimit(psutil.RLIMIT_NOFILE)
    holder = begun(
        start(*holding(LastingAttack(kind=AttackKind.LIMIT_FILES, seconds=FOR_EVER, processes=(victim.pid,))))
    )
    most = OTHER_DESCRIPTORS + SPARE_FILES
    assert victim.rlimit(psutil.RLIMIT_NOFILE) == (most, before[1])
    holder.terminate()
    assert holder.wait(120) == 0
    assert victim.rlimit(psutil.RLIMIT_NOFILE) == before
