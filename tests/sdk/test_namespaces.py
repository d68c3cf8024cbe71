"""Network namespaces as hosts: who reaches whom, by real sockets, while cables are cut and mended."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from resile.pool.namespaces import CommandFailed, Namespaces
from resile_shared.errors import UsageError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

CLONE_NEWNET = 0x40000000
ARRIVAL_SECONDS = 20.0
SILENCE_SECONDS = 0.3


def socket_in(namespaces: Namespaces, name: str) -> socket.socket:
    """A bound UDP socket in the network of one part."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{namespaces.part(name).namespace}") as there:
        assert libc.setns(there.fileno(), CLONE_NEWNET) == 0
        try:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            for option in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE: nothing waits or is lost but in the network
                made.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
            made.bind((namespaces.part(name).address, 0))
        finally:
            assert libc.setns(home.fileno(), CLONE_NEWNET) == 0
    return made


class Net:
    """Three parts, and a socket in each."""

    def __init__(self, namespaces: Namespaces, sockets: dict[str, socket.socket]) -> None:
        self.namespaces = namespaces
        self.sockets = sockets

    def arrives(self, sender: str, receiver: str) -> bool:
        """Send until it arrives, for long; where nothing does, the answer comes after a short time."""
        self._empty(receiver)
        self.sockets[receiver].settimeout(SILENCE_SECONDS)
        for _ in range(2):
            try:
                self.sockets[sender].sendto(b"x", self.sockets[receiver].getsockname())
                self.sockets[receiver].recv(1)
            except OSError:
                continue
            return True
        return False

    def comes_to_arrive(self, sender: str, receiver: str) -> None:
        """Wait until it does: a cable that was put in again needs a moment."""
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while not self.arrives(sender, receiver):
            assert time.monotonic() < deadline

    def num_arriving(self, sender: str, receiver: str, *, num: int) -> int:
        """Count how many of many large datagrams arrive."""
        self._empty(receiver)
        self.sockets[receiver].settimeout(SILENCE_SECONDS)
        for _ in range(num):
            self.sockets[sender].sendto(bytes(1400), self.sockets[receiver].getsockname())
        arrived = 0
        try:
            while arrived < num:
                self.sockets[receiver].recv(1400)
                arrived += 1
        except TimeoutError:
            pass
        return arrived

    def _empty(self, receiver: str) -> None:
        self.sockets[receiver].setblocking(False)
        try:
            while True:
                self.sockets[receiver].recv(1400)
        except BlockingIOError:
            pass


@pytest.fixture
def net() -> Iterator[Net]:
    namespaces = Namespaces.create(["a", "b", "c"])
    with ExitStack() as stack:
        stack.callback(namespaces.remove)
        yield Net(namespaces, {name: stack.enter_context(socket_in(namespaces, name)) for name in "abc"})


def names() -> str:
    """All links and namespaces of this machine."""
    return subprocess.check_output("ip -o link; ip netns", shell=True, text=True)


def test_a_part_whose_cable_is_cut_reaches_nobody_until_it_is_mended(net: Net) -> None:
    for sender, receiver in ("ab", "ba", "bc", "ca"):
        net.comes_to_arrive(sender, receiver)
    net.namespaces.cut("a")
    assert not net.arrives("a", "b")
    assert not net.arrives("b", "a")
    assert net.arrives("b", "c")
    net.namespaces.mend("a")
    net.comes_to_arrive("a", "b")
    net.comes_to_arrive("b", "a")


def test_two_parts_that_are_cut_from_each_other_reach_everybody_else(net: Net) -> None:
    net.namespaces.cut_between("a", "b")
    assert not net.arrives("a", "b")
    assert not net.arrives("b", "a")
    for sender, receiver in ("ac", "ca", "bc", "cb"):
        net.comes_to_arrive(sender, receiver)
    net.namespaces.mend_between("a", "b")
    net.comes_to_arrive("a", "b")
    net.comes_to_arrive("b", "a")


def test_one_direction_alone_can_be_lost(net: Net) -> None:
    net.namespaces.cut_one_way("a", "b")
    assert not net.arrives("a", "b")
    net.comes_to_arrive("b", "a")
    net.namespaces.mend_one_way("a", "b")
    net.comes_to_arrive("a", "b")


def test_what_was_cut_in_several_ways_is_mended_in_several(net: Net) -> None:
    net.namespaces.cut_one_way("a", "b")
    net.namespaces.cut("a")
    net.namespaces.mend("a")
    net.comes_to_arrive("a", "c")
    assert not net.arrives("a", "b")
    net.namespaces.cut("c")
    net.namespaces.slow("b", "1mbit")
    net.namespaces.mend_all()
    for sender, receiver in ("ab", "bc", "ca"):
        net.comes_to_arrive(sender, receiver)


def test_a_slow_part_loses_what_its_cable_does_not_carry(net: Net) -> None:
    net.comes_to_arrive("a", "b")
    net.comes_to_arrive("b", "a")
    net.namespaces.slow("a", "1mbit")
    for sender, receiver in ("ab", "ba"):
        assert 0 < net.num_arriving(sender, receiver, num=500) < 500
    net.namespaces.unslow("a")
    net.namespaces.unslow("a")
    assert net.num_arriving("a", "b", num=500) == 500
    with pytest.raises(CommandFailed, match="tc qdisc"):
        net.namespaces.slow("a", "quickly")


def test_a_part_that_is_not_there_is_named(net: Net) -> None:
    with pytest.raises(UsageError, match="the pool has no part d: its parts are a, b, c"):
        net.namespaces.cut("d")


def test_other_processes_find_the_namespaces_of_a_pool_while_it_has_them(net: Net, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="resile up --namespaces"):
        Namespaces.of(tmp_path)
    net.namespaces.save(tmp_path)
    assert Namespaces.of(tmp_path) == net.namespaces
    net.namespaces.remove(tmp_path)
    with pytest.raises(UsageError, match="resile up --namespaces"):
        Namespaces.of(tmp_path)


def test_two_pools_do_not_meet(net: Net) -> None:
    other = Namespaces.create(["a"])
    try:
        assert other.bridge != net.namespaces.bridge
        assert other.address != net.namespaces.address
    finally:
        other.remove()
    assert f"{other.bridge}:" not in names()
    assert net.namespaces.part("a").namespace in names()


CREATE = """
import subprocess, sys
from resile.pool.namespaces import Namespaces
from resile_shared.processes import dying_with_parent

namespaces = Namespaces.create(["a"])
inside = [*namespaces.enter("a"), "sleep", "1000"]
sleeper = subprocess.Popen(inside, preexec_fn=dying_with_parent(), start_new_session=True)
print(namespaces.bridge, sleeper.pid, flush=True)
sleeper.wait()
"""


def test_a_killed_pool_takes_its_parts_with_it_and_its_network_goes_at_the_next_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", CREATE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        bridge, pid = process.stdout.readline().split()
        sleeper = int(pid)
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while Path(f"/proc/{sleeper}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
        assert os.readlink(f"/proc/{sleeper}/ns/net") != os.readlink("/proc/self/ns/net")
        assert os.getpgid(sleeper) == sleeper
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    while Path(f"/proc/{sleeper}").exists():
        assert time.monotonic() < deadline
    assert f"{bridge}-a" in names()
    with ExitStack() as stack:
        next_ones = Namespaces.create(["b"])
        stack.callback(next_ones.remove)
        assert f"{bridge}-a" not in names()
    assert f"{next_ones.bridge}-b" not in names()
