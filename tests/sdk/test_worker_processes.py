"""What a command leaves alone when it kills what its agents have left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from resile_testing.waiting import block_until

COMMAND = """
import asyncio, subprocess, sys
from resile.pool.worker_processes import kill_orphans
from resile_learner.processes.descendants import OwnProcesses, adopt_orphans, kill_all

adopt_orphans()
own = OwnProcesses()

async def main():
    killing = asyncio.ensure_future(kill_orphans(set, own))
    subprocess.run(["sh", "-c", "sleep 1000 & echo $!"], check=True)  # a daemon, which this process adopts
    await asyncio.to_thread(sys.stdin.readline)
    killing.cancel()

asyncio.run(main())
subprocess.run(["sh", "-c", "sleep 1000 & echo $!"], check=True)
kill_all(own)
"""
WITH_HELPER = ["sh", "-c", f"sleep 1000 <&- & echo $!; exec {sys.executable} -c '{COMMAND}'"]
"""The command, and a helper of the shell that became it."""
IN_CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", COMMAND]
"""The command as the first process of a container."""


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.fixture
def command(request: pytest.FixtureRequest) -> "Iterator[subprocess.Popen[str]]":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(request.param, **pipes, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("command", [WITH_HELPER], indirect=True)
def test_a_child_of_the_program_before_exec_is_not_killed(command: "subprocess.Popen[str]") -> None:
    assert command.stdin is not None
    assert command.stdout is not None
    helper, daemon = (int(command.stdout.readline()) for _ in range(2))
    block_until(lambda: not is_alive(daemon))
    command.stdin.close()
    another = int(command.stdout.readline())
    assert command.wait() == 0
    assert not is_alive(another)
    assert is_alive(helper)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a namespace of processes")
@pytest.mark.parametrize("command", [IN_CONTAINER], indirect=True)
def test_what_others_start_in_a_container_is_not_killed_by_its_first_process(command: "subprocess.Popen[str]") -> None:
    assert command.stdout is not None
    command.stdout.readline()
    (first,) = psutil.Process(command.pid).children()
    enter = ["nsenter", "--target", str(first.pid), "--pid", "--mount", "sh", "-c", "sleep 1001 >&- & :"]
    subprocess.run(enter, check=True, env={"PATH": os.environ["PATH"]})  # as `docker exec` does
    own, others = (lambda: sleeping(first, 1000)), (lambda: sleeping(first, 1001))
    block_until(others)
    block_until(lambda: not own())
    (daemon,) = others()
    daemon.terminate()
    block_until(lambda: not first.children())  # it is reaped, too


def sleeping(first: psutil.Process, seconds: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in first.children():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.cmdline() == ["sleep", str(seconds)]:
                found.append(child)
    return found
