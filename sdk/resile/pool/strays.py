"""Processes that lost their parent below this one, and are its children since.

The command adopts them (`resile_learner.processes.descendants`), so that nothing outlives it. What an agent leaves
behind when it is killed must not wait for that.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Set

from resile_learner.processes.descendants import kill, processes

LOOK_SECONDS = 2.0


async def end_strays(known: Callable[[], Set[int]]) -> None:
    """Kill and reap all children that are not among the ids ``known``, for ever.

    A child has to be unknown in two looks: one that is being started is known a moment after its fork.
    """
    seen: Set[int] = frozenset()
    while True:
        unknown = {process.pid for process in processes() if process.parent == os.getpid()} - known()
        for pid in unknown & seen:
            _end(pid)
        seen = unknown
        await asyncio.sleep(LOOK_SECONDS)


def _end(pid: int) -> None:
    kill(pid)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
