"""Rounds: all members get the sums of the tree, bit for bit, or all survivors know who was lost."""

import itertools
import socket
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.collectives.blocks import MAX_DIRECT_BYTES, WINDOW, Shape
from resile_learner.collectives.frames import (
    HEADER_BYTES,
    MAX_HEADER_FRAME_BYTES,
    ROUND_PAYLOAD_BYTES,
    Kind,
    encode,
    encode_tag,
)
from resile_learner.collectives.layout import layout
from resile_learner.collectives.spec import Abandoned, Tag
from resile_learner.collectives.tree import pieces, ranges

from .link_group import (
    PATIENCE_SECONDS,
    Group,
    Work,
    abandoned,
    check_round,
    make_work,
    push_all,
    same_bits,
    sharing_group,
    start,
    wait,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("num_members", [1, 2, 3, 5, 8])
def test_sums_have_the_bits_of_the_tree(connect_exchange, num_members: int, dtype: torch.dtype) -> None:
    group = connect_exchange(num_members)
    members = range(num_members)
    for number, num_leaves in enumerate([1, 5, 24]):
        work = make_work(num_leaves, [0, 1, 15, 17, 1001, 100_003], dtype)
        check_round(group, list(members), Tag(1, number), work)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_the_greatest_values_of_a_bucket_may_count_instead_of_its_sums(connect_exchange, dtype: torch.dtype) -> None:
    group = connect_exchange(3)
    work = make_work(5, [1001, 100_003], dtype)
    specs = [replace(work.spec(worker, range(3), Tag(1, 0)), maxima=frozenset([1])) for worker in range(3)]
    held = [pieces(5, range_) for range_ in ranges(5, 3)]
    for spec, nodes in zip(specs, held, strict=True):
        for partial, node in zip(spec.partials[1], nodes, strict=True):
            partial.copy_(torch.stack(list(work.leaves[1][node.lo : node.hi])).amax(0))
    wait([start(lambda w=w: group.nodes[w].run_round(specs[w])) for w in range(3)])
    for spec in specs:
        assert same_bits(spec.sums[0], work.sums()[0])
        assert same_bits(spec.sums[1], torch.stack(list(work.leaves[1])).amax(0))


def test_a_header_takes_as_many_frames_as_it_needs(connect_exchange) -> None:
    group = connect_exchange(3)
    work = make_work(3, [1001])
    size = MAX_HEADER_FRAME_BYTES
    headers = [bytes([worker + 1]) * length for worker, length in enumerate([2 * size, 10, 2 * size + 5])]
    calls = [
        start(lambda w=w: group.nodes[w].run_round(work.spec(w, range(3), Tag(1, 0)), headers[w])) for w in range(3)
    ]
    assert wait(calls) == [tuple(headers)] * 3


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_buckets_of_several_megabytes_are_summed(connect_exchange, num_members: int) -> None:
    group = connect_exchange(num_members)
    check_round(group, list(range(num_members)), Tag(1, 0), make_work(num_members, [1_500_001, 2_000_000]))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_buckets_may_be_pushed_in_any_interleaving(data: st.DataObject) -> None:
    num_members = data.draw(st.integers(1, 6), "members")
    num_leaves = data.draw(st.integers(1, 12), "leaves")
    sizes = data.draw(st.lists(st.one_of(st.integers(0, 80), st.integers(0, 200_000)), max_size=5), "sizes")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]), "dtype")
    in_place = data.draw(st.booleans(), "sums in place of the partials")
    work = make_work(num_leaves, sizes, dtype)
    members = list(range(num_members))
    host_of = data.draw(st.lists(st.integers(0, 3), min_size=num_members, max_size=num_members), "hosts")
    group = sharing_group(
        num_members, *([worker for worker in members if host_of[worker] == host] for host in range(3))
    )
    specs = [work.spec(worker, members, Tag(1, 0), in_place=in_place) for worker in members]
    rounds = [group.nodes[worker].begin(specs[worker]) for worker in members]
    turns = data.draw(st.permutations([worker for worker in members for _ in sizes]), "turns")
    pushed = [0] * num_members
    for worker in turns:
        rounds[worker].push(pushed[worker])
        pushed[worker] += 1
    wait([start(lambda worker=worker: rounds[worker].finish(b"")) for worker in members])
    group.close()
    for spec in specs:
        assert all(map(same_bits, spec.sums, work.sums()))


def test_overflowing_sums_are_infinite_and_silent(connect_exchange, recwarn: pytest.WarningsRecorder) -> None:
    group = connect_exchange(2)
    work = Work(2, [[torch.full((40_000,), 3e38), torch.full((40_000,), 3e38)]])
    check_round(group, [0, 1], Tag(1, 0), work)
    # Of sums. What an earlier test has left open may be collected just now, which warns, too.
    assert not [str(each.message) for each in recwarn.list if not issubclass(each.category, ResourceWarning)]


def test_a_round_without_buckets_exchanges_headers(connect_exchange) -> None:
    group = connect_exchange(4)
    for number in range(20):
        check_round(group, [0, 1, 2, 3], Tag(1, number), Work(8, []))


def test_long_headers_are_exchanged(connect_exchange) -> None:
    group = connect_exchange(3)
    headers = [bytes([worker]) * 3_000_000 for worker in range(3)]
    work = make_work(3, [1000])
    calls = [
        start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)), headers[w])) for w in range(3)
    ]
    assert wait(calls) == [tuple(headers)] * 3


def test_a_member_may_be_a_round_ahead(connect_exchange) -> None:
    group = connect_exchange(3)
    work = [make_work(3, [100_000, 3], seed=number) for number in range(2)]
    specs = [[work[number].spec(worker, [0, 1, 2], Tag(1, number)) for worker in range(3)] for number in range(2)]
    wait([start(lambda w=w: group.nodes[w].run_round(specs[0][w])) for w in range(3)])
    ahead = [start(lambda w=w: group.nodes[w].run_round(specs[1][w])) for w in (0, 1)]
    late = group.nodes[2].begin(specs[1][2])
    push_all(late, specs[1][2])
    late.finish(b"")
    wait(ahead)
    for number in range(2):
        for spec in specs[number]:
            assert all(map(same_bits, spec.sums, work[number].sums()))


def test_membership_changes_between_rounds_over_the_same_links(connect_exchange) -> None:
    group = connect_exchange(5)
    for generation, members in enumerate([[0], [0, 1, 2], [2, 3, 4], [0, 1, 2, 3, 4], [3, 1], [4]]):
        for number in range(3):
            work = make_work(8, [40_000, 17], seed=generation)
            check_round(group, members, Tag(generation, 3 * generation + number), work)


def test_rank_order_need_not_be_the_order_of_ids(connect_exchange) -> None:
    check_round(connect_exchange(4), [2, 0, 3], Tag(1, 0), make_work(5, [70_000]))


def test_a_round_is_not_finished_before_all_buckets_are_pushed(connect_exchange) -> None:
    group = connect_exchange(1)
    open_round = group.nodes[0].begin(make_work(1, [1, 1]).spec(0, [0], Tag(1, 0)))
    with pytest.raises(ValueError, match=r"1 is next|0 is next"):
        open_round.push(1)
    with pytest.raises(ValueError, match="0 of 2 buckets"):
        open_round.finish(b"")


@pytest.mark.parametrize("seed", range(6))
def test_survivors_of_an_abandoned_round_repeat_it_at_once(connect_exchange, seed: int) -> None:
    """Worker 3 is frozen after some pushes; any control thread requests an abort at any moment."""
    group = connect_exchange(4)
    work = make_work(8, [300_000, 5, 70_000], seed=seed)
    specs = [work.spec(worker, [0, 1, 2, 3], Tag(1, 7)) for worker in range(4)]
    frozen = group.nodes[3].begin(specs[3])
    for bucket in range(seed % 4):
        frozen.push(bucket)
    calls = [start(lambda w=w: group.nodes[w].run_round(specs[w])) for w in range(3)]
    for _ in range(seed * 600):
        pass
    group.nodes[seed % 3].poller.abort_round(3, "frozen", generation=1)
    assert [(abandoned(call).suspect, abandoned(call).reason) for call in calls] == [(3, "frozen")] * 3
    for generation in (2, 3):
        check_round(group, [0, 1, 2], Tag(generation, 7), work)
    check_round(group, [0, 1, 2], Tag(4, 8), work)


@pytest.mark.parametrize("seed", range(6))
def test_abandoning_a_round_in_full_swing_leaves_usable_links(connect_exchange, seed: int) -> None:
    """Some members may have completed the round by then: they are ahead, and the next generation still works."""
    group = connect_exchange(3)
    work = make_work(3, [1_000_000, 100], seed=seed)
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)))) for w in range(3)]
    for _ in range(seed * 6000):
        pass
    group.nodes[seed % 3].poller.abort_round(2, "suspected", generation=1)
    for call in calls:
        with suppress(Abandoned):
            call.result(PATIENCE_SECONDS)
    check_round(group, [0, 1], Tag(2, 1), work)
    # The suspect was alive after all; it joins again.
    check_round(group, [0, 1, 2], Tag(3, 2), work)


def test_an_abort_between_rounds_ends_the_next_one_of_the_generation(connect_exchange) -> None:
    group = connect_exchange(3)
    work = make_work(3, [100])
    check_round(group, [0, 1, 2], Tag(1, 0), work)
    group.nodes[0].poller.abort_round(2, "frozen", generation=1)
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 1)))) for w in (0, 1)]
    assert [abandoned(call).suspect for call in calls] == [2, 2]
    check_round(group, [0, 1], Tag(2, 1), work)


def test_an_abort_between_rounds_does_not_concern_the_next_generation(connect_exchange) -> None:
    group = connect_exchange(3)
    work = make_work(3, [100])
    check_round(group, [0, 1, 2], Tag(1, 0), work)
    group.nodes[0].poller.abort_round(2, "frozen", generation=1)
    check_round(group, [0, 1, 2], Tag(2, 1), work)


def test_an_abort_because_of_a_worker_that_is_no_member_has_no_effect(connect_exchange) -> None:
    group = connect_exchange(3)
    group.nodes[0].poller.abort_round(2, "frozen", generation=1)
    check_round(group, [0, 1], Tag(1, 0), make_work(3, [100]))


def test_a_live_suspect_is_informed_that_the_round_was_abandoned(connect_exchange) -> None:
    group = connect_exchange(3)
    work = make_work(3, [100_000])
    group.nodes[0].poller.abort_round(2, "slow", generation=1)
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)))) for w in range(3)]
    assert [(abandoned(call).suspect, abandoned(call).reason) for call in calls] == [(2, "slow")] * 3


@pytest.mark.parametrize("pushes", [0, 1, 2])
def test_a_dead_member_is_named_by_all_others(connect_exchange, pushes: int) -> None:
    group = connect_exchange(4)
    work = make_work(8, [100_000, 10])
    specs = [work.spec(worker, [0, 1, 2, 3], Tag(1, 0)) for worker in range(4)]
    dying = group.nodes[3].begin(specs[3])
    for bucket in range(pushes):
        dying.push(bucket)
    calls = [start(lambda w=w: group.nodes[w].run_round(specs[w])) for w in range(3)]
    group.kill(3)
    assert [abandoned(call).suspect for call in calls] == [3, 3, 3]
    check_round(group, [0, 1, 2], Tag(2, 0), work)


def test_a_member_that_has_left_a_round_drains_its_links_so_that_none_waits_for_another(
    connect_exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resile_learner.collectives.round.DRAIN_TIMEOUT_MS", None)  # no timeout
    group = connect_exchange(4)
    work = make_work(8, [2_000_000])
    dying = group.nodes[3].begin(work.spec(3, [0, 1, 2, 3], Tag(1, 0)))
    rounds = [group.nodes[w].begin(work.spec(w, [0, 1, 2, 3], Tag(1, 0))) for w in range(3)]
    for open_round in rounds:
        open_round.push(0)  # more than sockets hold
    dying.push(0)
    group.kill(3)
    left: list[int] = []

    def finish_and_recover(worker: int) -> int:
        try:
            rounds[worker].finish(b"")
        except Abandoned as error:
            left.append(worker)
            for node in group.nodes:
                node.poller.wake()
            group.nodes[worker].poller.wait_until(lambda: len(left) == 3)  # its next operation, as in a recovery
            return error.suspect
        raise AssertionError("the round of a dead member was completed")

    assert wait([start(lambda w=w: finish_and_recover(w)) for w in range(3)]) == [3, 3, 3]


def test_a_removed_link_ends_the_round(connect_exchange) -> None:
    group = connect_exchange(3)
    work = make_work(3, [100_000])
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)))) for w in (0, 1)]
    group.nodes[0].poller.remove(2)
    assert [abandoned(call).suspect for call in calls] == [2, 2]
    assert group.nodes[0].poller.links.keys() == {1}
    check_round(group, [0, 1], Tag(2, 0), work)


def test_a_member_without_a_link_is_lost(connect_exchange) -> None:
    group = connect_exchange(2)
    work = make_work(3, [100])
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)))) for w in (0, 1)]
    assert [abandoned(call).suspect for call in calls] == [2, 2]


def test_a_round_left_open_is_abandoned_when_another_begins(connect_exchange) -> None:
    group = connect_exchange(3)
    work = make_work(3, [100_000])
    group.nodes[0].begin(work.spec(0, [0, 1, 2], Tag(1, 0)))
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)))) for w in (1, 2)]
    group.nodes[0].begin(work.spec(0, [0], Tag(2, 0)))
    assert [abandoned(call).suspect for call in calls] == [0, 0]


def pieces_frame(tag: Tag, *, block: int, length: int, bucket: int = 0) -> bytes:
    return encode(Kind.PIECES, tag, bucket=bucket, block=block, length=length) + bytes(length)


INVALID = {
    "noise": b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
    "too long": encode(Kind.SUM, Tag(1, 0), length=2**50),
    "a block that does not exist": pieces_frame(Tag(1, 0), block=77, length=64),
    "a bucket that does not exist": pieces_frame(Tag(1, 0), bucket=5, block=0, length=64),
    "a block of another length": pieces_frame(Tag(1, 0), block=0, length=64),
    "a header in too many parts": encode(Kind.HEADER, Tag(1, 0), block=2**20),
    "a part of a header that does not follow": encode(Kind.HEADER, Tag(1, 0), block=2)
    + encode(Kind.HEADER, Tag(1, 0), block=2),
    "two headers": 2 * encode(Kind.HEADER, Tag(1, 0)),
    "an abort that names nobody": encode(Kind.ABORT, Tag(1, 0)),
    "state in the middle of a round": encode(Kind.STATE, Tag(1, 0)),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_peer_that_sends_invalid_frames_counts_as_lost(connect_exchange, name: str) -> None:
    group = connect_exchange(2)
    stranger = group.stranger(member=0, worker=2)
    honest = group.stranger(member=1, worker=2)
    work = make_work(3, [30_000])
    calls = [start(lambda w=w: group.nodes[w].run_round(work.spec(w, [0, 1, 2], Tag(1, 0)))) for w in (0, 1)]
    stranger.sendall(INVALID[name])
    if name == "state in the middle of a round":
        stranger.shutdown(socket.SHUT_WR)  # stale state is discarded: the rest of a transfer that was abandoned
    assert [abandoned(call).suspect for call in calls] == [2, 2]
    assert group.nodes[0].poller.links.keys() == {1}
    check_round(group, [0, 1], Tag(2, 0), work)
    stranger.close()
    honest.close()


def test_a_peer_cannot_send_further_ahead_than_its_window(connect_exchange) -> None:
    """Scratch memory is bounded: pieces of a block for which there is no room yet break the rules."""
    group = connect_exchange(1)
    first, second = (group.stranger(member=0, worker=worker) for worker in (1, 2))
    spec = make_work(3, [2_000_000]).spec(0, [0, 1, 2], Tag(1, 0))
    blocks = layout(spec.pieces, 3, (Shape(2_000_000, 4),), 0).routes[1].pieces_in
    assert len(blocks) > WINDOW
    call = start(lambda: group.nodes[0].run_round(spec))
    with suppress(OSError):  # it is cut off in the middle of a frame
        for _, content, num_bytes, _ in blocks[: WINDOW + 1]:
            first.sendall(encode_tag(spec.tag) + content + bytes(num_bytes))
    error = abandoned(call)
    assert error.suspect == 1
    assert f"block {blocks[WINDOW].item.place}, cannot come now" in error.reason
    first.close()
    second.close()


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 24), st.lists(st.integers(0, 3_000_000), max_size=6))
def test_scratch_memory_does_not_grow_with_the_buckets(num_members: int, num_leaves: int, sizes: list[int]) -> None:
    held = tuple(pieces(num_leaves, range_) for range_ in ranges(num_leaves, num_members))
    for rank in range(num_members):
        plan = layout(held, num_leaves, tuple(Shape(size, 4) for size in sizes), rank)
        most_pieces = max(map(len, held))
        from_each = WINDOW * (ROUND_PAYLOAD_BYTES + 64) + most_pieces * MAX_DIRECT_BYTES
        assert plan.received_bytes <= (num_members - 1) * from_each
        sums = [transfer for route in plan.routes for transfer in route.sums_in]
        assert all(len(transfer.content) + len(encode_tag(Tag(0, 0))) == HEADER_BYTES for transfer in sums)


def test_a_peer_that_is_rounds_ahead_is_held_back_by_its_own_socket() -> None:
    group = Group(2, socket.socketpair)
    ahead = group.stranger(member=0, worker=9)
    ahead.setblocking(False)
    frame = pieces_frame(Tag(9, 1), block=0, length=65536)
    with pytest.raises(BlockingIOError):
        all(ahead.send(frame) for _ in itertools.count())
    for number in range(3):
        work = make_work(3, [100, 50_000])
        spec = work.spec(0, [0, 9, 1], Tag(1 + number, 0))
        open_round = group.nodes[0].begin(spec)
        push_all(open_round, spec)
        group.nodes[0].poller.abort_round(9, "does not take part", generation=1 + number)
        with pytest.raises(Abandoned):
            open_round.finish(b"")
        with pytest.raises(BlockingIOError):
            ahead.send(bytes(HEADER_BYTES))
    group.close()
    ahead.close()
