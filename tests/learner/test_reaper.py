"""The reaper above a command: nothing that the command has started outlives either of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from resile_testing.waiting import block_until

LEAVES_DAEMON = "setsid sleep 600 & echo $!"
"""The daemon holds the output open."""


def start(shell: str, *, parent: int | None = None) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "resile_learner.processes.reaper", str(parent or os.getpid())]
    return subprocess.Popen([*command, "sh", "-c", shell], stdout=subprocess.PIPE, text=True)


def test_a_daemon_is_killed_when_the_command_has_ended() -> None:
    reaper = start(LEAVES_DAEMON)
    output, _ = reaper.communicate()
    assert reaper.returncode == 0
    assert not psutil.pid_exists(int(output))


@pytest.mark.parametrize(("shell", "status"), [("exit 3", 3), ("kill -KILL $$", -9), ("kill -TERM $$", -15)])
def test_it_ends_as_the_command_did(shell: str, status: int) -> None:
    with start(shell) as reaper:
        assert reaper.wait() == status


def test_when_it_is_ended_so_is_the_command_with_all_below_it() -> None:
    with start(f"{LEAVES_DAEMON}; echo $$; sleep 600") as reaper:
        assert reaper.stdout is not None
        pids = [int(reaper.stdout.readline()) for _ in range(2)]
        reaper.terminate()
        assert reaper.wait() == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


STARTER = """
import os, subprocess, sys
subprocess.Popen([*sys.argv[1:4], "resile_learner.processes.reaper", str(os.getpid()), "sh", "-c", sys.argv[4]]).wait()
"""


def test_when_its_parent_is_killed_so_is_the_command_with_all_below_it(tmp_path: Path) -> None:
    shell = f"({LEAVES_DAEMON}; echo $$) > {tmp_path}/draft; mv {tmp_path}/draft {tmp_path}/pids; sleep 600"
    parent = subprocess.Popen([sys.executable, "-c", STARTER, sys.executable, "-P", "-m", shell])
    block_until((tmp_path / "pids").exists)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    block_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_command_whose_parent_has_ended_already_is_not_run() -> None:
    with start("echo started", parent=1) as reaper:
        assert reaper.stdout is not None
        assert reaper.stdout.read() == ""
