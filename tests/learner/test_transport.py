"""The contract of a transport, and that links rely on nothing else."""

import ctypes
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
import torch

from resile_learner.collectives.spec import Tag
from resile_learner.collectives.state_transfer import Origin
from resile_learner.collectives.transport import TcpTransport, Traffic, Transport
from resile_learner.worker import links

from .link_group import PAIRS, Group, check_round, make_work, start, tcp_pair

SO_ATTACH_FILTER = 26
Ends = tuple[Transport, Transport]


@pytest.fixture(params=PAIRS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one, other = map(TcpTransport, PAIRS[request.param]())
    yield one, other
    one.close()
    other.close()


def receive(transport: Transport, num_bytes: int) -> bytes:
    memory = bytearray(num_bytes)
    received = 0
    while received < num_bytes:
        try:
            received += transport.receive([memoryview(memory)[received:]])
        except BlockingIOError:
            continue
    return bytes(memory)


def test_many_buffers_are_sent_in_one_call_and_received_into_many(ends: Ends) -> None:
    one, other = ends
    assert one.send([b"ab", memoryview(b"cde"), b"", b"f"]) == 6
    memory = bytearray(6)
    view = memoryview(memory)
    assert receive(other, 1) == b"a"
    assert other.receive([view[:2], view[2:6]]) == 5
    assert memory[:5] == b"bcdef"


def test_nothing_blocks(ends: Ends) -> None:
    one, other = ends
    with pytest.raises(BlockingIOError):
        other.receive([memoryview(bytearray(1))])
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += one.send([bytes(1 << 16)])
    assert receive(other, sent) == bytes(sent)


def test_the_end_of_the_stream_is_seen_behind_what_was_sent(ends: Ends) -> None:
    one, other = ends
    one.send([b"last"])
    one.write_eof()
    assert receive(other, 4) == b"last"
    assert other.receive([memoryview(bytearray(1))]) == 0
    other.send([b"back"])
    assert receive(one, 4) == b"back"


def test_an_abort_breaks_both_sides_but_keeps_the_descriptor(ends: Ends) -> None:
    one, other = ends
    fd = one.fileno()
    start(one.abort).result()
    assert one.fileno() == fd
    assert other.receive([memoryview(bytearray(1))]) == 0
    with pytest.raises(OSError, match="Broken pipe"):
        one.send([b"x"])


def test_a_closed_transport_fails_whatever_has_its_descriptor_now(ends: Ends) -> None:
    one, _ = ends
    one.close()
    assert one.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        one.send([b"x"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        one.receive([memoryview(bytearray(1))])


class Trickle(TcpTransport):
    """Moves few bytes in a call."""

    def send(self, buffers: Sequence[bytes | memoryview], /) -> int:
        return super().send([next(memoryview(buffer)[:997] for buffer in buffers if len(buffer))])

    def receive(self, buffers: Sequence[memoryview], /) -> int:
        return super().receive([next(buffer[:991] for buffer in buffers if len(buffer))])


def test_links_need_no_transport_that_moves_everything_at_once() -> None:
    group = Group(3, transport=Trickle)
    for number in range(3):
        check_round(group, [0, 1, 2], Tag(1, number), make_work(6, [20_000, 5, 0]))
    room = [torch.empty(20_000), torch.empty(3)]
    received = start(lambda: group.nodes[1].transfer.receive(lambda _: room))
    group.nodes[0].transfer.send(1, 2, b"skeleton", [torch.ones(20_000), torch.zeros(3)])
    assert received.result() == Origin(0, 2, [])
    assert [tensor.sum().item() for tensor in room] == [20_000, 0]
    group.close()


def swallow(sock: socket.socket) -> None:
    """Drop all that arrives for ``sock`` before its TCP sees it, as a broken path does."""
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0
    program = ctypes.create_string_buffer(drop_all)
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def test_what_a_broken_path_swallows_stays_unacknowledged() -> None:
    here, there = tcp_pair()
    transport = TcpTransport(here)
    assert transport.unacknowledged_seconds() == 0
    swallow(there)
    transport.send([b"lost"])
    while transport.unacknowledged_seconds() < 1:
        time.sleep(0.05)
    transport.close()
    assert transport.unacknowledged_seconds() == 0
    there.close()


def test_what_was_sent_counts_once_the_peer_has_confirmed_it() -> None:
    here, there = tcp_pair()
    one, other = TcpTransport(here), TcpTransport(there)
    before = one.traffic()
    memory = bytearray(1 << 20)
    sent = 0
    for _ in range(100):
        with suppress(BlockingIOError):
            while True:
                sent += one.send([memory])
        with suppress(BlockingIOError):
            while True:
                other.receive([memoryview(memory)])
    assert before.num_bytes < one.traffic().num_bytes <= before.num_bytes + sent
    assert before.microseconds < one.traffic().microseconds
    one.close()
    assert one.traffic() == Traffic()
    other.close()
    unix, peer = map(TcpTransport, PAIRS["unix"]())
    assert unix.traffic() == Traffic()
    unix.close()
    peer.close()


def test_a_peer_that_does_not_read_makes_its_link_no_slower() -> None:
    """It computes; the network carried at once what it had room for."""
    here, there = tcp_pair()
    one, other = TcpTransport(here), TcpTransport(there)
    with suppress(BlockingIOError):
        while True:
            one.send([bytes(1 << 20)])
    readings = [Traffic()]
    while not readings[-1].num_bytes or readings[-1] != readings[-2]:
        time.sleep(0.1)
        readings.append(one.traffic())
        assert len(readings) < 100, "the time goes on although nothing is sent"
    one.close()
    other.close()


def test_a_rate_is_that_of_what_was_sent_meanwhile() -> None:
    assert Traffic(3_000_000, 2_500_000).rate_since(Traffic(1_000_000, 500_000)) == 1_000_000
    assert Traffic(3_000_000, 2_500_000).rate_since(Traffic(3_000_000, 2_500_000)) == 0
    assert Traffic().rate_since(Traffic(1, 1)) == 0


def test_what_a_peer_does_not_read_is_acknowledged_all_the_same() -> None:
    """A peer that computes for long leaves what it cannot use yet unread."""
    here, there = tcp_pair()
    links.keep_alive(here, seconds=1)
    transport = TcpTransport(here)
    with suppress(BlockingIOError):
        while True:
            transport.send([b"x" * 65536])
    longest = 0.0
    for _ in range(60):
        time.sleep(0.05)
        longest = max(longest, transport.unacknowledged_seconds())
        with suppress(BlockingIOError):
            transport.send([b"x"])
    assert longest < 1
    transport.close()
    there.close()
