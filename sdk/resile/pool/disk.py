"""Whether the disk of a pool's bus takes what is written: found out by writing.

Free space is not enough: a quota may be used up, all inodes may be taken, a file system may have become read-only, and
one on another machine may not answer.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from resile_shared.bus.nats_server import NatsServer

CHECK_SECONDS = 2.0
ANSWER_SECONDS = 10.0
LEAST_FREE_BYTES = 16 << 20
"""With less free space than this, the disk counts as full."""
_PROBE = ".probe"
_PROBE_BYTES = 1 << 20
_EFFECT = "running jobs train on, but changes fail until it takes writes again"
_REFUSALS = (b"no space left on device", b"disk quota exceeded", b"read-only file system", b"input/output error")
"""What nats-server logs of a write that failed."""


async def watch_disk(bus: NatsServer, log: Callable[[str], None]) -> None:
    """Report a disk that takes no writes, and stop ``bus`` when it does again, so that it is restarted; never returns.

    A nats-server that could not write refuses writes until it is restarted.
    """
    fault = ""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        probing = asyncio.ensure_future(asyncio.to_thread(write_fault, bus.folder))
        if not (await asyncio.wait({probing}, timeout=ANSWER_SECONDS))[0]:
            log(f"the disk of {bus.folder} has not answered for {ANSWER_SECONDS:g} s: {_EFFECT}")
        before, fault = fault, await probing
        if fault and fault != before:
            log(f"{fault}: {_EFFECT}")
        logged = b"" if fault else await asyncio.to_thread(bus.read_log)
        if any(refusal in logged for refusal in _REFUSALS):
            log("the disk takes writes again: nats-server stops, since it refuses writes until it is restarted")
            await bus.stop()


def write_fault(folder: Path) -> str:
    """Return why a file cannot be stored in ``folder``, in words; empty: it can."""
    probe = folder / _PROBE
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
            os.fsync(file.fileno())
        is_full = shutil.disk_usage(folder).free < LEAST_FREE_BYTES
        return f"the disk of {folder} is full" if is_full else ""
    except OSError as error:
        return _describe(error, folder)
    finally:
        with suppress(OSError):
            probe.unlink()


def _describe(error: OSError, folder: Path) -> str:
    match error.errno:
        case errno.ENOSPC:
            return f"the disk of {folder} is full{'' if _has_inodes(folder) else ': it has no inodes left'}"
        case errno.EDQUOT:
            return f"the disk quota at {folder} is used up"
        case errno.EROFS:
            return f"the disk of {folder} is read-only"
        case _:
            return f"{folder} cannot be written: {error.strerror}"


def _has_inodes(folder: Path) -> bool:
    """Whether files can be added. Some file systems have no number of inodes."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return True
    return found.f_ffree > 0 or found.f_files == 0
