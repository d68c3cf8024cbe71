"""Finds and kills every process below this one, so that none outlives it. Linux only.

A worker runs the user's code, which may start anything: loaders, shells, daemons. Groups and sessions miss what leaves
them, so each worker, the fork server and the agent are *subreapers*: what loses its parent becomes a child of the
nearest one above. While a worker lives its daemons are below it; when it has ended they are children of the fork
server, which knows that they are no workers: `kill_strays`.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

EXEC_SECONDS = 0.2
"""A process that has no command for longer than this many seconds has removed it."""
JANITOR_SECONDS = 5.0
MAX_KILL_SECONDS = 5.0
_STAT_BYTES = 4096
_JANITORS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def die_with_parent(parent: int) -> None:
    """Have this process killed when ``parent`` ends, more precisely: when the thread that started this process ends.

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
        """Whether it is a helper of multiprocessing or torch that removes shared memory once all its users ended.

        A process has no command for a moment while `exec` makes it another program: this waits until it has one.
        """
        deadline = time.monotonic() + EXEC_SECONDS
        while not (command := _read(self.pid, "cmdline")) and _is_alive(self.pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        return any(name in command for name in _JANITORS)


def processes() -> Iterator[Process]:
    """Iterate over all processes of this machine; those that end meanwhile are left out.

    Read without pathlib, which interns a string for each process that ever lived.
    """
    numbers = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return (process for process in map(_process, numbers) if process is not None)


def _process(pid: int) -> Process | None:
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # a file object takes four times as long
    except OSError:
        return None
    try:
        content = os.read(descriptor, _STAT_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    state, parent, _, session = content.rpartition(b")")[2].split(None, 4)[:4]
    return Process(pid, int(parent), int(session), state == b"Z")


def _is_alive(pid: int) -> bool:
    process = _process(pid)
    return process is not None and not process.is_zombie


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; empty if it is gone, or of another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


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


def kill_session(session: int, *, keep: Collection[int] = ()) -> None:
    """Kill every process of ``session`` but ``keep`` and the janitors, which end by themselves when the others have."""

    def find() -> list[Process]:
        members = (p for p in processes() if p.session == session and not p.is_zombie and not p.is_janitor)
        return [process for process in members if process.pid not in keep]

    deadline = time.monotonic() + MAX_KILL_SECONDS
    while (found := find()) and time.monotonic() < deadline:  # a process can fork between being found and being killed
        for process in found:
            kill(process.pid)
        time.sleep(0.001)


def kill_strays(
    keep: Collection[int],
    *,
    spare_janitors: bool = True,
    is_known: Callable[[Process], bool] = lambda process: False,
) -> bool:
    """Kill and reap all children but ``keep`` and known ones, with all below them; return whether janitors are left."""
    deadline = time.monotonic() + MAX_KILL_SECONDS
    while True:
        strays = [child for child in _children() if child.pid not in keep and not is_known(child)]
        below = [child for stray in strays for child in descendants(stray.pid)]
        alive = [process for process in (*strays, *below) if not process.is_zombie]
        found = [process for process in alive if not (spare_janitors and process.is_janitor)]
        for process in found:
            kill(process.pid)
        for stray in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(stray.pid, os.WNOHANG)
        if not found or time.monotonic() > deadline:  # a process can fork between being found and being killed
            return bool(alive)
        time.sleep(0.001)


def _children() -> list[Process]:
    return [process for process in processes() if process.parent == os.getpid()]


def children_in_session() -> list[int]:
    """The children that share this process's session: none that left it can have come back."""
    return [process.pid for process in _children() if process.session == os.getsid(0)]


class OwnProcesses:
    """Tells the descendants that this process starts from now on from those of others.

    Others are the children that a process had before `exec` made it this program, and the first process of a container
    adopts all that lose their parent there. Where there may be any, own ones are known by a variable of their
    environment.
    """

    def __init__(self) -> None:
        variable = f"_RESILE_STARTED_BY_{os.getpid()}"
        self._mark = f"{variable}=".encode()
        self._may_have_others = os.getpid() == 1 or bool(_children())
        os.environ[variable] = ""

    def excludes(self, process: Process) -> bool:
        """Whether ``process``, a descendant, is of others."""
        if not self._may_have_others:
            return False
        variables = _read(process.pid, "environ").split(b"\0")
        return not any(variable.startswith(self._mark) for variable in variables)


def kill_all(own: OwnProcesses | None = None) -> None:
    """Kill and reap every descendant, those of others excepted; the janitors last, after they had time to clean up.

    It finds all of them only if `adopt_orphans` was called before the first was started.
    """
    start = time.monotonic()
    while _reap_some() and time.monotonic() - start < JANITOR_SECONDS + MAX_KILL_SECONDS:
        found = [process for process in descendants(os.getpid()) if own is None or not own.excludes(process)]
        if own is not None and not found:
            return
        spare_janitors = time.monotonic() - start < JANITOR_SECONDS
        for process in found:
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
