"""Which processes of a worker are killed with it, and which end by themselves."""

import os
import signal
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
