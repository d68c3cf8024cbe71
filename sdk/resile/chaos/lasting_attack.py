"""A process that applies an attack and undoes it after some seconds, or as soon as its parent exits.

    python -m resile.chaos.lasting_attack '{"kind": "freeze", ...}'

It writes a line when the attack has begun. The end of its input, or SIGTERM, ends the attack early.
"""

import contextlib
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from resile_learner.processes.descendants import descendants

from ..pool.namespaces import Namespaces
from .attacks import AttackKind
from .second_scheduler import second_scheduler

ON_SECONDS, OFF_SECONDS = 0.02, 0.08  # a slowed process runs and stands still in turn
_BLOCK_BYTES = 1 << 20
SPARE_FILES = 8
"""How many more files a process may open whose files are limited: enough for two more workers."""
OTHER_DESCRIPTORS = 64
"""How many files a worker counts on for other things than its peers (`resile_learner/worker/peers.py`)."""


class LastingAttack(BaseModel):
    """What is applied, and for how long."""

    kind: AttackKind
    seconds: float
    processes: tuple[int, ...] = ()
    with_descendants: bool = False
    home: Path = Path()
    part: str = ""
    """The part of the pool's network that is attacked."""
    other: str = ""
    """The part from which ``part`` is cut off; empty: from all."""
    rate: str = ""
    ballast: Path = Path()
    """The file that takes up all free space of a disk."""
    folder: Path = Path()
    """The folder that is not there."""


def main() -> int:
    """Apply the attack that the first argument describes."""
    lasting = LastingAttack.model_validate_json(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    deadline = time.monotonic() + lasting.seconds
    with _applied(lasting) as steps:
        print("begun", flush=True)
        while (left := deadline - time.monotonic()) > 0 and not _is_input_closed(min(left, next(steps))):
            pass
    return 0


@contextlib.contextmanager
def _applied(lasting: LastingAttack) -> Iterator[Iterator[float]]:
    """Attack while the block runs; yields an iterator of the seconds until its next step."""
    match lasting.kind:
        case AttackKind.FREEZE | AttackKind.SLOW:
            with _stopped(lasting) as steps:
                yield steps
        case AttackKind.DUPLICATE:
            with second_scheduler(lasting.processes[0], lasting.home), _stopped(lasting) as steps:
                yield steps
        case kind if kind.cuts:
            with _network(lasting):
                yield _forever()
        case AttackKind.DISK_FULL:
            with _full(lasting.ballast):
                yield _forever()
        case AttackKind.UNMOUNT:
            with _unmounted(lasting):
                yield _forever()
        case AttackKind.LIMIT_FILES:
            with _limited(lasting.processes):
                yield _forever()
        case _:
            raise ValueError(f"{lasting.kind} does not last")


@contextlib.contextmanager
def _stopped(lasting: LastingAttack) -> Iterator[Iterator[float]]:
    handles: dict[int, int] = {}
    try:
        while new := _victims(lasting) - handles.keys():  # a stopped process starts no others
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    handles[pid] = os.pidfd_open(pid)
                    signal.pidfd_send_signal(handles[pid], signal.SIGSTOP)
            if not new & handles.keys():
                break
        yield _duty(handles) if lasting.kind is AttackKind.SLOW else _forever()
    finally:
        _send(handles, signal.SIGCONT)


def _victims(lasting: LastingAttack) -> set[int]:
    below = {p.pid for root in lasting.processes for p in descendants(root)} if lasting.with_descendants else set()
    return below | set(lasting.processes)


def _duty(handles: dict[int, int]) -> Iterator[float]:
    while True:
        yield OFF_SECONDS
        _send(handles, signal.SIGCONT)
        yield ON_SECONDS
        _send(handles, signal.SIGSTOP)


def _send(handles: dict[int, int], number: signal.Signals) -> None:
    for handle in handles.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


@contextlib.contextmanager
def _network(lasting: LastingAttack) -> Iterator[None]:
    network, part, other = Namespaces.of(lasting.home), lasting.part, lasting.other
    match lasting.kind:
        case AttackKind.SLOW_LINK:
            begin, end = partial(network.slow, part, lasting.rate), partial(network.unslow, part)
        case AttackKind.CUT_ONE_WAY:
            begin, end = partial(network.cut_one_way, part, other), partial(network.mend_one_way, part, other)
        case AttackKind.CUT_PEER | AttackKind.CUT_BUS:
            begin, end = partial(network.cut_between, part, other), partial(network.mend_between, part, other)
        case _:
            begin, end = partial(network.cut, part), partial(network.mend, part)
    try:
        begin()
        yield
    finally:
        end()


@contextlib.contextmanager
def _full(ballast: Path) -> Iterator[None]:
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(ballast.parent).free)
            file.seek(0, os.SEEK_END)
            while file.write(bytes(_BLOCK_BYTES)):
                pass
        yield
    finally:
        ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def _unmounted(lasting: LastingAttack) -> Iterator[None]:
    """Hide a folder, and kill those that know what was in it."""
    hidden = lasting.folder.with_name(f".hidden-{lasting.folder.name}")
    lasting.folder.rename(hidden)
    try:
        _send({pid: os.pidfd_open(pid) for pid in lasting.processes if Path(f"/proc/{pid}").exists()}, signal.SIGKILL)
        yield
    finally:
        shutil.copytree(hidden, lasting.folder, dirs_exist_ok=True)
        shutil.rmtree(hidden)


@contextlib.contextmanager
def _limited(pids: Sequence[int]) -> Iterator[None]:
    """Let processes open only a few more files."""
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                most = max(OTHER_DESCRIPTORS, len(os.listdir(f"/proc/{pid}/fd"))) + SPARE_FILES
                before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(most, before[pid][0]), before[pid][1]))
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _forever() -> Iterator[float]:
    while True:
        yield float("inf")


def _is_input_closed(seconds: float) -> bool:
    """Wait; return whether the input was closed meanwhile."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    sys.exit(main())
