"""Hosts of a bench: network namespaces of this machine that are connected by a link of a given speed. As root."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
INTERFACE = "link0"
"""What the end of the link is called on both hosts."""


def why_impossible() -> str | None:
    """Why this process cannot make namespaces; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    missing = [command for command in ("ip", "tc", "unshare", "nsenter") if shutil.which(command) is None]
    return f"it needs {', '.join(missing)}" if missing else None


@contextmanager
def two_hosts(megabits: float | None) -> Iterator[tuple[str, str]]:
    """Two namespaces that are gone after this block, as files for ``enter``; ``megabits`` a second between them.

    Raises CalledProcessError: the system forbids it.
    """
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(2)]
    try:
        files = [f"/proc/{holder.pid}/ns/net" for holder in holders]
        own = os.stat("/proc/self/ns/net").st_ino
        while any(os.stat(file).st_ino == own for file in files):  # until unshare has run
            if any(holder.poll() is not None for holder in holders):
                raise subprocess.CalledProcessError(1, "unshare --net")
        _ip(files[0], f"link add {INTERFACE} type veth peer name {INTERFACE} netns {holders[1].pid}")
        for file, address in zip(files, ADDRESSES, strict=True):
            _ip(file, "link set lo up")
            _ip(file, f"address add {address}/24 dev {INTERFACE}")
            _ip(file, f"link set {INTERFACE} up")
            if megabits is not None:
                shape = f"tbf rate {megabits:g}mbit burst {max(32, round(megabits)):d}kb latency 50ms"
                _run(file, f"tc qdisc add dev {INTERFACE} root {shape}")
        yield files[0], files[1]
    finally:
        for holder in holders:
            holder.kill()
            with suppress(subprocess.SubprocessError):
                holder.wait(10)


ADDRESSES = ("10.77.0.1", "10.77.0.2")


def enter(file: str) -> None:
    """Move this process into a namespace."""
    fd = os.open(file, os.O_RDONLY)
    try:
        if _LIBC.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


def _ip(file: str, arguments: str) -> None:
    _run(file, f"ip {arguments}")


def _run(file: str, command: str) -> None:
    subprocess.run(["nsenter", f"--net={file}", *command.split()], check=True)
