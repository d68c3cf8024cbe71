"""Kills orphans: processes whose parent has exited and that became children of this process.

The command is a child subreaper (`resile_learner.processes.descendants`), so that nothing outlives it. What a killed
agent leaves behind is killed earlier, here.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Set

from resile_learner.processes.descendants import kill, processes

POLL_SECONDS = 2.0


async def kill_orphans(known: Callable[[], Set[int]]) -> None:
    """Kill and reap all children whose ids are not in ``known``; never returns.

    Only a child that is unknown in two polls is killed: one that has just been forked becomes known a moment later.
    """
    seen: Set[int] = frozenset()
    while True:
        unknown = {process.pid for process in processes() if process.parent == os.getpid()} - known()
        for pid in unknown & seen:
            _end(pid)
        seen = unknown
        await asyncio.sleep(POLL_SECONDS)


def _end(pid: int) -> None:
    kill(pid)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
