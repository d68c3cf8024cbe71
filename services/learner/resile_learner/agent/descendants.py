"""Holding on to every process below this one, so that none outlives it. Linux only.

A worker runs the user's code, which may start anything: loaders, shells, daemons. Process groups alone miss what leaves
its group, so the zygote is a *subreaper*: whatever loses its parent below it becomes its child, and `kill_all` goes on
until no child is left.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

JANITOR_SECONDS = 2.0
GIVE_UP_SECONDS = 5.0
_JANITORS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def die_with_parent(parent: int) -> None:
    """Die with the process ``parent``, to be exact: with the thread of it that started this process.

    Die now if it is gone already.
    """
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_on_parent_death(number: signal.Signals) -> None:
    """Ask for a signal at the parent's death. A fork forgets this."""
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
        """Whether it is a helper of multiprocessing or torch that removes shared memory once all its users are gone."""
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False
        return any(name in command for name in _JANITORS)


def processes() -> Iterator[Process]:
    """All processes of this machine, as far as they stand still for it."""
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
    _kill_while_any(lambda: [p for p in processes() if p.session == session and not p.is_zombie and not p.is_janitor])


def _kill_while_any(find: Callable[[], list[Process]]) -> None:
    """Look again until there is nothing to find: a process can fork between being found and being killed."""
    give_up = time.monotonic() + GIVE_UP_SECONDS
    while (found := find()) and time.monotonic() < give_up:
        for process in found:
            kill(process.pid)
        time.sleep(0.001)


def kill_all() -> None:
    """Kill and reap every descendant; the janitors last, after they had time to clean up.

    It finds them all only if `adopt_orphans` was called before the first was started.
    """
    start = time.monotonic()
    while _reap_some() and time.monotonic() - start < JANITOR_SECONDS + GIVE_UP_SECONDS:
        patient = time.monotonic() - start < JANITOR_SECONDS
        for process in descendants(os.getpid()):
            if not (patient and process.is_janitor):
                kill(process.pid)
        time.sleep(0.005)


def _reap_some() -> bool:
    """Reap the children that have ended; tell whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def kill(pid: int) -> None:
    """SIGKILL to ``pid``, if it is there and ours to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
