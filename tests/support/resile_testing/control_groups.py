"""Control groups of this machine, of version 1 or 2, in which a test runs commands. Requires root."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TOP = Path("/sys/fs/cgroup")
_LIMITS = {"cpu": ("cpu.cfs_quota_us", "cpu.max"), "memory": ("memory.limit_in_bytes", "memory.max")}


@contextmanager
def limited_group(controller: str, limit: int) -> Iterator[tuple[str, ...]]:
    """Make a group in a group with a limit (bytes, or microseconds in 100,000); give the words before a command in it.

    All processes in it must have ended after the block.
    """
    first, second = _LIMITS[controller]
    is_second = not (_TOP / controller).exists()
    if is_second:
        (_TOP / "cgroup.subtree_control").write_text(f"+{controller}")
    outer = (_TOP if is_second else _TOP / controller) / f"resile-test-{uuid.uuid4().hex[:8]}"
    inner = outer / "inner"
    outer.mkdir()
    try:
        (outer / (second if is_second else first)).write_text(str(limit))
        inner.mkdir()
        yield ("sh", "-c", f'echo $$ > {inner}/cgroup.procs && exec "$@"', "sh")
    finally:
        for folder in (inner, outer):
            if folder.exists():
                os.rmdir(folder)
