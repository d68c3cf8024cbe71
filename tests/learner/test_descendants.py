"""Which processes of a worker are killed with it, and which end by themselves."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import util

import pytest

from resile_learner.processes.descendants import Process


def started(command: Sequence[str]) -> Process:
    """A process that has just been started: `exec` may still be under way."""
    pid = util.spawnv_passfds(os.fsencode(command[0]), command, ())
    return Process(pid, os.getpid(), os.getsid(0), is_zombie=False)


@pytest.mark.parametrize(("name", "is_janitor"), [("multiprocessing.resource_tracker", True), ("anything", False)])
def test_what_removes_shared_memory_is_known_as_soon_as_it_is_started(name: str, is_janitor: bool) -> None:
    for _ in range(30):
        process = started([sys.executable, "-c", "import time; time.sleep(60)", name])
        try:
            assert process.is_janitor == is_janitor
        finally:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
        assert not process.is_janitor, "it is gone"


READ_MANY = """
import tracemalloc
from resile_learner.processes.descendants import Process

def read(numbers):
    for pid in numbers:
        assert not Process(pid, 1, 1, is_zombie=False).is_janitor

read(range(10_000_000, 10_000_100))
tracemalloc.start()
read(range(20_000_000, 20_020_000))
print(tracemalloc.get_traced_memory()[0])
"""
"""Reads of processes that cannot exist: their numbers are above the largest."""


def test_what_is_read_of_processes_takes_no_memory_that_stays() -> None:
    """An interned string for each process that ever lived enlarges a table that never shrinks, in every fork server."""
    kept = subprocess.run([sys.executable, "-c", READ_MANY], check=True, capture_output=True, text=True).stdout
    assert int(kept) < 10_000
