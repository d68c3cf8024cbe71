"""State transfer: what a donor sends is in the tensors of the joiner, whatever else is on the links."""

import threading

import pytest
import torch
from torch import Tensor

from resile_learner.collectives.frames import STATE_FRAME_BYTES, Kind, encode, encode_skeleton
from resile_learner.collectives.spec import Abandoned, Tag
from resile_learner.collectives.state_transfer import Origin, StateMismatch, StateTransfer

from .copy_streams import FakeStream, staged_by
from .link_group import (
    PATIENCE_SECONDS,
    Node,
    abandoned,
    check_round,
    make_work,
    push_all,
    same_bits,
    same_values,
    start,
    wait,
)


def mixed_state(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(300_001, generator=generator)
    return [
        numbers,
        numbers[:5].bfloat16(),
        numbers[7].clone(),
        torch.zeros(0),
        torch.arange(5000).view(50, 100).t(),
        numbers[:1001] > 0,
        torch.arange(3, dtype=torch.int64),
        numbers[: 128 * 1024].view(64, 2, 1024).contiguous().to(memory_format=torch.contiguous_format).transpose(0, 1),
        torch.complex(numbers[:10], numbers[10:20]).conj(),
        torch.tensor(True),
        numbers[:777].half(),
    ]


@pytest.mark.parametrize("strided", [False, True])
def test_a_state_of_mixed_tensors_arrives_in_the_tensors_made_for_it(connect_group, strided: bool) -> None:
    group = connect_group(2)
    state = mixed_state(0)
    room = [torch.empty_like(t) if strided else torch.empty(t.shape, dtype=t.dtype) for t in state]
    described: list[bytes] = []

    def allocate(skeleton: bytes) -> list[Tensor]:
        described.append(skeleton)
        return room

    received = start(lambda: group.nodes[1].transfer.receive(allocate))
    group.nodes[0].transfer.send(1, 5, b"what follows", state)
    assert received.result(PATIENCE_SECONDS) == Origin(0, 5, [])
    assert described == [b"what follows"]
    assert same_values(room, state)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_state_of_tensors_on_devices_travels_through_two_small_buffers_on_each_side(
    connect_group, late: bool, strided: bool
) -> None:
    group = connect_group(2)
    streams = [FakeStream(late=late) for _ in group.nodes]
    transfers = [
        StateTransfer(node.poller, worker, stream_of=staged_by(streams[worker]))
        for worker, node in enumerate(group.nodes)
    ]
    state = mixed_state(0)
    room = [torch.zeros_like(t) if strided else torch.zeros(t.shape, dtype=t.dtype) for t in state]
    received = start(lambda: transfers[1].receive(lambda _: room))
    transfers[0].send(1, 5, b"", state)
    assert received.result(PATIENCE_SECONDS) == Origin(0, 5, [])
    assert same_values(room, state)
    assert [[len(buffer) for buffer in stream.buffers] for stream in streams] == [[STATE_FRAME_BYTES] * 2] * 2


def test_what_a_lost_donor_has_sent_is_written_before_what_another_one_sends(connect_group) -> None:
    group = connect_group(2)
    stream = FakeStream(late=True)
    receiver = StateTransfer(group.nodes[1].poller, 1, stream_of=staged_by(stream))
    dying = group.stranger(member=1, worker=9)
    room = [torch.zeros(300_000)]
    has_begun = threading.Event()

    def allocate(skeleton: bytes) -> list[Tensor]:
        has_begun.set()
        return room

    received = start(lambda: receiver.receive(allocate))
    dying.sendall(encode_skeleton(Tag(1, 0), num_bytes=1_200_000, skeleton=b""))
    dying.sendall(encode(Kind.STATE, Tag(1, 0), length=STATE_FRAME_BYTES) + b"\1" * STATE_FRAME_BYTES)
    dying.sendall(encode(Kind.STATE, Tag(1, 0), block=1, length=1_200_000 - STATE_FRAME_BYTES) + b"\1" * 1000)
    dying.close()
    assert has_begun.wait(PATIENCE_SECONDS)
    group.nodes[0].transfer.send(1, 1, b"", [torch.ones(300_000)])
    assert received.result(PATIENCE_SECONDS) == Origin(0, 1, [])
    assert same_values(room, [torch.ones(300_000)])
    assert stream.num_done == stream.num_started == 3


@pytest.mark.parametrize("num_tensors", [0, 1, 5000])
def test_many_small_tensors_or_none_are_a_state_too(connect_group, num_tensors: int) -> None:
    group = connect_group(2)
    state = [torch.full((3,), float(number)) for number in range(num_tensors)]
    room = [torch.empty(3) for _ in state]
    received = start(lambda: group.nodes[1].transfer.receive(lambda _: room))
    group.nodes[0].transfer.send(1, 1, b"x" * 3_000_000, state)
    assert received.result(PATIENCE_SECONDS) == Origin(0, 1, [])
    assert same_values(room, state)


def test_a_joiner_receives_its_state_while_others_are_already_in_its_first_round(connect_group) -> None:
    """Workers 0 and 1 train, 2 joins: 1 is in the first round of the new generation before 0 has sent its state."""
    group = connect_group(3)
    work = make_work(3, [500_000, 40_000, 3])
    check_round(group, [0, 1], Tag(1, 0), work)
    tag = Tag(2, 1)
    specs = [work.spec(worker, [0, 1, 2], tag) for worker in range(3)]
    ahead = group.nodes[1].begin(specs[1])
    push_all(ahead, specs[1])
    finished = start(lambda: ahead.finish(b""))
    state = mixed_state(1)
    room = [torch.empty(t.shape, dtype=t.dtype) for t in state]
    received = start(lambda: group.nodes[2].transfer.receive(lambda _: room, generation=2))
    group.nodes[0].transfer.send(2, 2, b"", state)
    assert received.result(PATIENCE_SECONDS) == Origin(0, 2, [])
    assert same_values(room, state)
    wait([finished, *(start(lambda w=w: group.nodes[w].run_round(specs[w])) for w in (0, 2))])
    for spec in specs:
        assert all(map(same_bits, spec.sums, work.sums()))


def test_a_member_that_is_behind_receives_the_state_over_a_link_that_holds_an_abandoned_round(connect_group) -> None:
    group = connect_group(2)
    work = make_work(2, [200_000])
    spec = work.spec(0, [0, 1], Tag(1, 1))
    ahead = group.nodes[0].begin(spec)
    push_all(ahead, spec)
    group.nodes[0].poller.abort_round(0, "left", generation=1)
    with pytest.raises(Abandoned):
        ahead.finish(b"")
    room = [torch.empty(10)]
    received = start(lambda: group.nodes[1].transfer.receive(lambda _: room, generation=2))
    group.nodes[0].transfer.send(1, 2, b"", [torch.arange(10.0)])
    assert received.result(PATIENCE_SECONDS) == Origin(0, 2, [])
    assert same_values(room, [torch.arange(10.0)])
    check_round(group, [0, 1], Tag(3, 1), work)


def test_a_state_may_come_over_a_link_made_later(connect_group) -> None:
    group = connect_group(1)
    group.nodes.append(Node(1))
    room = [torch.empty(4)]
    received = start(lambda: group.nodes[1].transfer.receive(lambda _: room))
    group.connect(0, 1)
    group.nodes[0].transfer.send(1, 3, b"", [torch.ones(4)])
    assert received.result(PATIENCE_SECONDS) == Origin(0, 3, [])
    assert same_values(room, [torch.ones(4)])


def test_a_donor_lost_half_way_is_replaced_by_another(connect_group) -> None:
    group = connect_group(2)
    dying = group.stranger(member=1, worker=9)
    room = [torch.zeros(1000)]
    asked: list[bytes] = []

    def allocate(skeleton: bytes) -> list[Tensor]:
        asked.append(skeleton)
        return room

    received = start(lambda: group.nodes[1].transfer.receive(allocate))
    dying.sendall(encode_skeleton(Tag(1, 0), num_bytes=4000, skeleton=b"first"))
    dying.sendall(encode(Kind.STATE, Tag(1, 0), length=4000) + b"\1" * 1000)
    dying.close()
    group.nodes[0].transfer.send(1, 1, b"second", [torch.ones(1000)])
    assert received.result(PATIENCE_SECONDS) == Origin(0, 1, [])
    assert asked[-1] == b"second"
    assert same_values(room, [torch.ones(1000)])


def test_a_state_of_another_size_than_the_room_for_it_is_refused(connect_group) -> None:
    group = connect_group(2)
    received = start(lambda: group.nodes[1].transfer.receive(lambda _: [torch.empty(3)]))
    group.nodes[0].transfer.send(1, 1, b"", [torch.empty(4)])
    error = received.exception(PATIENCE_SECONDS)
    assert isinstance(error, StateMismatch)
    assert (error.announced, error.allocated) == (16, 12)
    check_round(group, [0, 1], Tag(1, 0), make_work(2, [10]))


def test_sending_state_to_a_lost_joiner_names_it(connect_group) -> None:
    group = connect_group(2)
    call = start(lambda: group.nodes[0].transfer.send(1, 1, b"", [torch.zeros(20_000_000)]))
    group.kill(1)
    assert abandoned(call).suspect == 1
    with pytest.raises(Abandoned):
        group.nodes[0].transfer.send(1, 1, b"", [])
