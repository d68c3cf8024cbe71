"""What a command leaves alone when it kills what its agents have left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
WITH_HELPER = f"sleep 1000 <&- & echo $!; exec {sys.executable} -c '{COMMAND}'"
"""The command, and a helper of the shell that became it."""


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.fixture
def command() -> "Iterator[subprocess.Popen[str]]":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", WITH_HELPER], **pipes, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


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
