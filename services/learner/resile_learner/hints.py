"""Hints for errors that ordinary code raises in an elastic loop."""

import os
import re
import traceback
from pathlib import Path
from typing import Protocol

_SHARED_MEMORY = Path("/dev/shm")
_LARGER = "make it larger (docker run --shm-size=8g; on Kubernetes an emptyDir of medium Memory)"
_NO_SHARED_MEMORY = re.compile(
    r"out of shared memory|unable to (allocate|open) shared memory|unable to (write|resize|mmap).*/torch_"
)
_USES_GRADIENTS = re.compile(r"\.grad\b|\bgrads\b|grad_norm|clip_grad")
_LACKS_VALUES = re.compile(r"None|empty|division by zero|out of range")
"""What errors say where a gradient is None, or where a list of those that are not None is empty."""


class GradientState(Protocol):
    """What a loop knows of the gradients of its model."""

    @property
    def missing_gradients(self) -> str:
        """Why parameters have no gradients in the current batch, and what to do; empty if they may have some."""


def hint_about_gradients(error: BaseException, loop: GradientState) -> str:
    """A remedy for ``error``, which ended a script that trains with ``loop``, or an empty string."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    uses_gradients = any(map(_USES_GRADIENTS.search, lines)) and _LACKS_VALUES.search(str(error))
    return loop.missing_gradients if uses_gradients else ""


def is_about_shared_memory(error: BaseException) -> bool:
    """Whether ``error`` says that there is no shared memory left."""
    return bool(_NO_SHARED_MEMORY.search(str(error)))


def hint_about_shared_memory(error: BaseException, folder: Path = _SHARED_MEMORY) -> str:
    """A remedy for ``error`` if it says that there is no shared memory left, or an empty string."""
    if not is_about_shared_memory(error):
        return ""
    disk = os.statvfs(folder)
    size, free = (number * disk.f_frsize / 1e6 for number in (disk.f_blocks, disk.f_bavail))
    return (
        f"tensors that processes share, as the batches of a DataLoader's, are in {folder}, which has {size:.0f} MB "
        f"here, {free:.0f} MB of them free: {_LARGER}, or use num_workers=0"
    )


def hint_about_small_shared_memory(folder: Path = _SHARED_MEMORY) -> str:
    """What to do if processes that read batches had to do without ``folder``."""
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize / 1e6
    return f"{folder} has {size:.0f} MB and was full, so processes hand over batches more slowly: {_LARGER}"


def hint_about_files(error: BaseException) -> str:
    """A remedy for ``error`` of one of several workers if all of them may write the same file, or an empty string."""
    is_of_file = isinstance(error, OSError) and error.filename is not None
    if not (is_of_file or isinstance(error, EOFError) or "PytorchStreamReader" in str(error)):
        return ""
    return (
        "all workers run this line, in the same folder: let only the worker with the lowest rank write files, and read "
        "what it has written, as in `if loader.is_lowest_rank:`"
    )
