"""Distinguishes the kernel's out-of-memory kills from other kills."""

from pathlib import Path


class OutOfMemoryKills:
    """Counts the kernel's out-of-memory kills in this control group, or on the machine where the group has no count."""

    def __init__(self) -> None:
        self._accounted = _count()

    def claim(self) -> bool:
        """Whether there was a kill that no earlier call has claimed. Call it once for each worker that was killed."""
        if _count() <= self._accounted:
            return False
        self._accounted += 1
        return True


def _count() -> int:
    for source in (_group_events(), Path("/proc/vmstat")):
        try:
            lines = source.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _group_events() -> Path:
    try:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    except (OSError, IndexError):
        line = ""
    return Path("/sys/fs/cgroup") / line.partition("::")[2].lstrip("/") / "memory.events"
