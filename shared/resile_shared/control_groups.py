"""What the control groups of this process limit, as containers do by version 1 or 2. Linux only.

A group's limit holds for all groups in it. A container sees the groups from its own inwards, and not those outside.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def num_processors(root: Path = _ROOT) -> int:
    """Return how many processors this process can keep busy, at least 1: by its affinity and the quotas of its groups.

    A quota of 2.5 processors counts as 2.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def own_folders(controller: str, root: Path = _ROOT) -> list[Path]:
    """Return the folders of the groups of this process, its own first, then each outer one, as far as they are seen.

    ``controller`` says which of the hierarchies of version 1; version 2 has one for all. On a machine with both, only
    the folders of one of them have files of that controller.
    """
    folders = []
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                folders += _folders(PurePosixPath(group), mounts, controller if controllers else "", root)
    except (OSError, ValueError):  # no /proc, or not that of Linux
        return []
    return folders


def _folders(group: PurePosixPath, mounts: Iterable[str], controller: str, root: Path) -> list[Path]:
    """Return the folders of ``group``, from the first file system that shows its hierarchy."""
    for line in mounts:  # "36 35 0:26 ROOT PLACE rw,relatime shared:9 - TYPE SOURCE OPTIONS"
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        shown, place = mount.split(" ")[3:5]
        if kind != ("cgroup" if controller else "cgroup2") or (controller and controller not in options.split(",")):
            continue
        # A group outside of what is shown is named from elsewhere: what is shown begins with the process's own group.
        inner = group.relative_to(shown) if group.is_relative_to(shown) else PurePosixPath()
        top = root / place.lstrip("/")
        return [top / inner, *(top / outer for outer in inner.parents)]
    return []


def _quotas(root: Path) -> Iterator[float]:
    """Return how many processors the groups of this process may use at the same time."""
    for folder in own_folders("cpu", root):
        try:
            quota, period = _words(folder / "cpu.max") or (
                *_words(folder / "cpu.cfs_quota_us"),
                *_words(folder / "cpu.cfs_period_us"),
            )
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
        except (ValueError, ZeroDivisionError):  # the group has no such files
            continue


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
