"""The worker processes of agents on this machine, read from /proc, and the end of those that an agent leaves behind.

Workers are forked and have no command line of their own: each keeps a memory file open whose name identifies its job
and number (`resile_learner/processes/fork_protocol.py`).
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resile_learner.processes.descendants import OwnProcesses, descendants, kill, processes
from resile_learner.processes.fork_protocol import PROCESS_NAME_PREFIX

_MARK = f"/memfd:{PROCESS_NAME_PREFIX}"
_GONE = " (deleted)"
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class RunningWorker:
    """A worker and its process."""

    job: str
    number: int
    host: str
    pid: int


def workers_below(agent: int, host: str) -> Iterator[RunningWorker]:
    """Find the workers that descend from the process ``agent``, below its fork servers.

    A fork server has the file of a worker open too, for a moment, while it forks it.
    """
    for process in descendants(agent):
        is_leader = process.session == process.pid and process.parent != agent
        if is_leader and (name := _name_of(process.pid)):
            job, _, number = name.partition("/")
            yield RunningWorker(job, int(number), host, process.pid)


def has_workers(agent: asyncio.subprocess.Process | None) -> bool:
    """Whether workers run below an agent's process."""
    return agent is not None and any(workers_below(agent.pid, ""))


def _name_of(pid: int) -> str:
    """Return ``<job>/<number>`` of a worker's process, nothing for any other."""
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return ""
    for entry in entries:
        with suppress(OSError):  # closed since it was listed
            link = os.readlink(entry)
            if link.startswith(_MARK):
                return link.removeprefix(_MARK).removesuffix(_GONE)
    return ""


async def kill_orphans(known: Callable[[], Set[int]], own: OwnProcesses) -> None:
    """Kill all ``own`` children whose ids are not in ``known``, and reap all that have ended; never returns.

    The command is a child subreaper (`resile_learner.processes.descendants`), so that nothing outlives it. What a
    killed agent leaves behind becomes a child of this process, and is killed earlier, here.

    Only a child that is unknown in two polls is killed: one that has just been forked becomes known a moment later.
    """
    seen: Set[int] = frozenset()
    while True:
        children = [process for process in processes() if process.parent == os.getpid()]
        found = {process.pid for process in children if process.is_zombie or not own.excludes(process)}
        unknown = found - known()
        for pid in unknown & seen:
            _end(pid)
        seen = unknown
        await asyncio.sleep(POLL_SECONDS)


def _end(pid: int) -> None:
    kill(pid)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
