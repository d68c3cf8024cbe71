"""Finds and kills every process below this one, so that none outlives it. Linux only.

A worker runs the user's code, which may start anything: loaders, shells, daemons. Process groups alone miss what leaves
its group, so the fork server is a *subreaper*: whatever loses its parent below it becomes its child, and `kill_all`
continues until no child is left.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

JANITOR_SECONDS = 2.0
MAX_KILL_SECONDS = 5.0
_JANITORS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def die_with_parent(parent: int) -> None:
    """Have this process killed when ``parent`` ends, precisely: when its thread that started this process ends.

    Exits now if the parent has ended already.
    """
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_on_parent_death(number: signal.Signals) -> None:
    """Request a signal at the parent's death. A forked child does not inherit this."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    is_zombie: bool

    @property
    def is_janitor(self) -> bool:
        """Whether it is a helper of multiprocessing or torch that removes shared memory once all its users ended."""
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False
        return any(name in command for name in _JANITORS)


def processes() -> Iterator[Process]:
    """Iterate over all processes of this machine; those that end meanwhile are left out."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            state, parent, _, session = text.rpartition(")")[2].split()[:4]
            yield Process(int(entry), int(parent), int(session), state == "Z")


def descendants(root: int) -> list[Process]:
    """Every living process below ``root``."""
    below: dict[int, list[Process]] = {}
    for process in processes():
        below.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        children = below.get(queue.pop(), [])
        found += (child for child in children if not child.is_zombie)
        queue += (child.pid for child in children)
    return found


def kill_session(session: int) -> None:
    """Kill every process of ``session`` but the janitors, which end by themselves when the others have."""

    def find() -> list[Process]:
        return [p for p in processes() if p.session == session and not p.is_zombie and not p.is_janitor]

    deadline = time.monotonic() + MAX_KILL_SECONDS
    while (found := find()) and time.monotonic() < deadline:  # a process can fork between being found and being killed
        for process in found:
            kill(process.pid)
        time.sleep(0.001)


def kill_all() -> None:
    """Kill and reap every descendant; the janitors last, after they had time to clean up.

    It finds all of them only if `adopt_orphans` was called before the first was started.
    """
    start = time.monotonic()
    while _reap_some() and time.monotonic() - start < JANITOR_SECONDS + MAX_KILL_SECONDS:
        spare_janitors = time.monotonic() - start < JANITOR_SECONDS
        for process in descendants(os.getpid()):
            if not (spare_janitors and process.is_janitor):
                kill(process.pid)
        time.sleep(0.005)


def _reap_some() -> bool:
    """Reap the children that have ended; return whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def kill(pid: int) -> None:
    """Send SIGKILL to ``pid``, if it exists and belongs to this user."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
