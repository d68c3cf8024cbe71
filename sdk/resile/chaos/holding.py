"""A process that holds an attack, and undoes it: after some seconds, or as soon as whoever started it is gone.

    python -m resile.chaos.holding '{"kind": "freeze", ...}'

It writes a line when the attack has begun. The end of its input, and SIGTERM, cut the attack short.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from resile_learner.processes.descendants import descendants

from ..pool.namespaces import Namespaces
from .attacks import Kind

ON_SECONDS, OFF_SECONDS = 0.02, 0.08  # of what is slowed
_BLOCK_BYTES = 1 << 20


class Hold(BaseModel):
    """What is held, and for how long."""

    kind: Kind
    seconds: float
    processes: tuple[int, ...] = ()
    with_descendants: bool = False
    home: Path = Path()
    part: str = ""
    """Of the pool's network."""
    rate: str = ""
    ballast: Path = Path()
    """The file that takes all space."""


def main() -> int:
    """Hold what the first argument says."""
    hold = Hold.model_validate_json(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    deadline = time.monotonic() + hold.seconds
    with _held(hold) as spell:
        print("begun", flush=True)
        while (left := deadline - time.monotonic()) > 0 and not _is_called_off(min(left, next(spell))):
            pass
    return 0


@contextlib.contextmanager
def _held(hold: Hold) -> Iterator[Iterator[float]]:
    """Attack while the block runs; what it is given tells again and again how long to wait until the next step."""
    match hold.kind:
        case Kind.FREEZE | Kind.SLOW:
            with _stopped(hold) as steps:
                yield steps
        case Kind.PARTITION | Kind.SLOW_LINK:
            with _network(hold):
                yield _forever()
        case Kind.DISK_FULL:
            with _full(hold.ballast):
                yield _forever()
        case _:
            raise ValueError(f"{hold.kind} does not last")


@contextlib.contextmanager
def _stopped(hold: Hold) -> Iterator[Iterator[float]]:
    handles: dict[int, int] = {}
    try:
        while new := _victims(hold) - handles.keys():  # what is stopped starts nothing more
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    handles[pid] = os.pidfd_open(pid)
                    signal.pidfd_send_signal(handles[pid], signal.SIGSTOP)
            if not new & handles.keys():
                break
        yield _forever() if hold.kind is Kind.FREEZE else _duty(handles)
    finally:
        _send(handles, signal.SIGCONT)


def _victims(hold: Hold) -> set[int]:
    below = {p.pid for root in hold.processes for p in descendants(root)} if hold.with_descendants else set()
    return below | set(hold.processes)


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
def _network(hold: Hold) -> Iterator[None]:
    network = Namespaces.of(hold.home)
    try:
        if hold.kind is Kind.PARTITION:
            network.cut(hold.part)
        else:
            network.slow(hold.part, hold.rate)
        yield
    finally:
        if hold.kind is Kind.PARTITION:
            network.mend(hold.part)
        else:
            network.unslow(hold.part)


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


def _forever() -> Iterator[float]:
    while True:
        yield float("inf")


def _is_called_off(seconds: float) -> bool:
    """Wait; tell whether the input has ended meanwhile."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    sys.exit(main())
