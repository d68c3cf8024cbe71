"""Hosts of a bench: network namespaces of this machine on one switch, each with a cable of a given speed. As root."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
INTERFACE = "link0"
"""What the cable is called on each host."""


def why_impossible() -> str | None:
    """Why this process cannot make namespaces; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    missing = [command for command in ("ip", "tc", "unshare", "nsenter") if shutil.which(command) is None]
    return f"it needs {', '.join(missing)}" if missing else None


@contextmanager
def connected_hosts(megabits: Sequence[float | None]) -> Iterator[tuple[str, ...]]:
    """Namespaces on one switch that are gone after this block, as files for ``enter``.

    ``megabits`` a second go through the cable of each, in either direction; None: no limit. Raises CalledProcessError:
    the system forbids it.
    """
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(len(megabits) + 1)]
    try:
        switch, *files = [f"/proc/{holder.pid}/ns/net" for holder in holders]
        own = os.stat("/proc/self/ns/net").st_ino
        while any(os.stat(file).st_ino == own for file in (switch, *files)):  # until unshare has run
            if any(holder.poll() is not None for holder in holders):
                raise subprocess.CalledProcessError(1, "unshare --net")
        _ip(switch, "link add switch type bridge")
        _ip(switch, "link set switch up")
        for number, (file, rate) in enumerate(zip(files, megabits, strict=True)):
            port = f"port{number}"
            _ip(file, f"link add {INTERFACE} type veth peer name {port} netns {holders[0].pid}")
            _ip(file, "link set lo up")
            _ip(file, f"address add {address(number)}/24 dev {INTERFACE}")
            _ip(file, f"link set {INTERFACE} up")
            _ip(switch, f"link set {port} master switch up")
            if rate is not None:
                shape = f"tbf rate {rate:g}mbit burst {max(32, round(rate)):d}kb latency 50ms"
                _run(file, f"tc qdisc add dev {INTERFACE} root {shape}")
                _run(switch, f"tc qdisc add dev {port} root {shape}")
        yield tuple(files)
    finally:
        for holder in holders:
            holder.kill()
            with suppress(subprocess.SubprocessError):
                holder.wait(10)


def address(number: int) -> str:
    """That of a host, by its number."""
    return f"10.77.0.{number + 1}"


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
