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
def connected_hosts(
    megabits: Sequence[float | None], racks: Sequence[int] = (), *, between_racks: float | None = None
) -> Iterator[tuple[str, ...]]:
    """Namespaces on one switch that are gone after this block, as files for ``enter``.

    ``megabits`` a second go through the cable of each, in either direction; None: no limit. With ``racks``, the number
    of the rack of each, every rack has a switch of its own, whose cable to the first one carries ``between_racks``.
    Raises CalledProcessError: the system forbids it.
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
        for rack in dict.fromkeys(racks):
            _ip(switch, f"link add rack{rack} type bridge")
            _ip(switch, f"link set rack{rack} up")
            _ip(switch, f"link add up{rack} type veth peer name down{rack}")
            _ip(switch, f"link set up{rack} master rack{rack} up")
            _ip(switch, f"link set down{rack} master switch up")
            if between_racks is not None:
                _limit(switch, f"up{rack}", between_racks)
                _limit(switch, f"down{rack}", between_racks)
        for number, (file, rate) in enumerate(zip(files, megabits, strict=True)):
            port = f"port{number}"
            _ip(file, f"link add {INTERFACE} type veth peer name {port} netns {holders[0].pid}")
            _ip(file, "link set lo up")
            _ip(file, f"address add {address(number)}/24 dev {INTERFACE}")
            _ip(file, f"link set {INTERFACE} up")
            _ip(switch, f"link set {port} master {f'rack{racks[number]}' if racks else 'switch'} up")
            if rate is not None:
                _limit(file, INTERFACE, rate)
                _limit(switch, port, rate)
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


def _limit(file: str, device: str, megabits: float) -> None:
    """Let ``megabits`` a second out of a device."""
    shape = f"tbf rate {megabits:g}mbit burst {max(32, round(megabits)):d}kb latency 50ms"
    _run(file, f"tc qdisc add dev {device} root {shape}")


def _ip(file: str, arguments: str) -> None:
    _run(file, f"ip {arguments}")


def _run(file: str, command: str) -> None:
    subprocess.run(["nsenter", f"--net={file}", *command.split()], check=True)
