"""Memory that the workers of one host share: they agree on it by themselves, and nobody reads what is stale."""

import fcntl
import gc
import mmap
import multiprocessing
import os
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resile_learner.collectives.blocks import DIRECT_BYTES, MIN_SHARED_BYTES, NUM_STAGE_BUFFERS, STAGE_BYTES, Sharing
from resile_learner.collectives.link_rates import (
    HOP_SECONDS,
    MEASURED_BYTES,
    choose_owners,
    choose_racks,
    host_rates,
    rate_of,
    smallest_grouped,
)
from resile_learner.collectives.memory_agreement import MemoryAgreement
from resile_learner.collectives.segments import TOKEN_BYTES, Mailbox, OwnSegment, create_segment, map_segment
from resile_learner.collectives.spec import Abandoned, Tag
from resile_learner.collectives.status import (
    NO_RACK,
    NOWHERE,
    Host,
    Status,
    decode_status,
    find_host,
    rack_of,
    status_bytes,
)
from resile_learner.collectives.transport import Traffic

from .link_group import Group, abandoned, check_round, make_work, push_all, sharing_group, start

HERE = find_host()
OTHER_CONTAINER = HERE._replace(network=b"another!")
ROUNDS_TO_AGREE = 3
WORKS = [make_work(4, [60_000, 40_001, 7], seed=seed) for seed in range(3)]
"""One after the other, so that the sums of an earlier round are wrong in a later one."""
WORK = WORKS[0]
TOKEN = b"t" * TOKEN_BYTES
Connect = Callable[..., Group]


def segments_in_use() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:resile")


def num_descriptors() -> int:
    gc.collect()  # what earlier tests left is not closed while one counts
    return len(os.listdir("/proc/self/fd"))


def partners(group: Group, worker: int) -> list[int]:
    """The workers that ``worker`` exchanges with in memory, once it has begun a round with all of them."""
    agreement = group.nodes[worker].agreement
    assert agreement is not None
    return sorted(agreement.partners)


@pytest.fixture
def connect() -> Iterator[Connect]:
    groups: list[Group] = []

    def connect(*hosts: Host, report: Callable[[str], None] = lambda reason: None) -> Group:
        def agreement(worker: int) -> MemoryAgreement:
            return MemoryAgreement(worker, host=hosts[worker], report=report, min_bytes=1 << 17)

        groups.append(Group(len(hosts), agreement=agreement))
        return groups[-1]

    yield connect
    for group in groups:
        group.close()


def run_rounds(group: Group, members: list[int], *, generation: int, first: int, count: int = ROUNDS_TO_AGREE) -> None:
    for number in range(first, first + count):
        check_round(group, members, Tag(generation, number), WORKS[number % len(WORKS)])


def test_workers_of_one_host_agree_to_share_memory_and_sums_keep_their_bits(connect: Connect) -> None:
    group = connect(HERE, HERE, HERE)
    run_rounds(group, [0, 1, 2], generation=1, first=0)
    assert [partners(group, worker) for worker in range(3)] == [[1, 2], [0, 2], [0, 1]]
    run_rounds(group, [0, 1, 2], generation=1, first=3)


def test_members_agree_anew_after_each_change(connect: Connect) -> None:
    """Also if one that is no member any more does not release what it has mapped."""
    group = connect(HERE, HERE, HERE)
    for generation, members in enumerate([[0, 1], [0, 1, 2], [2, 1]], start=1):
        run_rounds(group, members, generation=generation, first=8 * generation, count=8)
        for worker in members:
            assert partners(group, worker) == sorted(members.index(other) for other in members if other != worker)


def go_on(group: Group, members: list[int], *, generation: int, groups: Sequence[Sequence[int]]) -> None:
    for worker in members:
        agreement = group.nodes[worker].agreement
        assert agreement is not None
        agreement.continue_in(generation, tuple(members), groups)


def groups_of(group: Group, worker: int) -> Sequence[Sequence[int]]:
    agreement = group.nodes[worker].agreement
    assert agreement is not None
    return agreement.groups


def test_who_stays_shares_memory_from_the_first_round_of_the_next_generation_on(connect: Connect) -> None:
    """Also with one that has left and does not release what it has mapped, for any number of rounds."""
    group = connect(HERE, HERE, HERE)
    run_rounds(group, [0, 1, 2], generation=1, first=0)
    assert {str(groups_of(group, worker)) for worker in range(3)} == {"[[0, 1, 2]]"}
    in_use = segments_in_use()
    for generation in (2, 3):
        go_on(group, [2, 1], generation=generation, groups=[[0, 1, 2]])
        assert [partners(group, worker) for worker in (2, 1)] == [[1], [0]]
        run_rounds(group, [2, 1], generation=generation, first=20 * generation, count=8)
    assert segments_in_use() <= in_use, "their segments are the same"


def test_a_joiner_that_is_told_the_groups_joins_them(connect: Connect) -> None:
    group = connect(HERE, HERE, Host(b"a kernel", b"anothern"), HERE)
    run_rounds(group, [0, 1, 2], generation=1, first=0)
    go_on(group, [3, 0, 1, 2], generation=2, groups=groups_of(group, 0))
    assert [partners(group, worker) for worker in (3, 0, 1, 2)] == [[], [2], [1], []]
    run_rounds(group, [3, 0, 1, 2], generation=2, first=10, count=4)
    assert [partners(group, worker) for worker in (3, 0, 1, 2)] == [[1, 2], [0, 2], [0, 1], []]


def test_a_generation_begins_without_groups_after_a_round_has_failed(connect: Connect) -> None:
    group = connect(HERE, HERE, HERE)
    run_rounds(group, [0, 1, 2], generation=1, first=0)
    spec = WORK.spec(0, [0, 1, 2], Tag(1, 4))
    open_round = group.nodes[0].begin(spec)
    push_all(open_round, spec)
    group.nodes[0].poller.abort_round(2, "it is lost", generation=1)
    with pytest.raises(Abandoned):
        open_round.finish(b"")
    assert groups_of(group, 0) == []


def test_workers_of_other_hosts_take_part_over_tcp(connect: Connect) -> None:
    elsewhere = Host(b"a kernel", b"anothern")
    group = connect(HERE, elsewhere, HERE, NOWHERE)
    run_rounds(group, [0, 1, 2, 3], generation=1, first=0, count=5)
    assert [partners(group, worker) for worker in range(4)] == [[2], [], [0], []]


def test_members_of_each_host_share_memory_and_everybody_knows_it(connect: Connect) -> None:
    """What crosses a link depends on the groups of all hosts, so all members have to use the same ones."""
    elsewhere = Host(b"a kernel", b"anothern")
    group = connect(HERE, elsewhere, HERE, elsewhere, elsewhere)
    run_rounds(group, [0, 1, 2, 3, 4], generation=1, first=0, count=5)
    assert [partners(group, worker) for worker in range(5)] == [[2], [3, 4], [0], [1, 4], [1, 3]]


def test_a_member_that_maps_late_joins_its_group_late(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    group = connect(HERE, HERE, HERE)
    late = group.nodes[2].agreement
    assert late is not None
    with monkeypatch.context() as patch:
        patch.setattr(late, "_map", lambda: None)
        run_rounds(group, [0, 1, 2], generation=1, first=0, count=5)
        assert [partners(group, worker) for worker in range(3)] == [[1], [0], []]
    run_rounds(group, [0, 1, 2], generation=1, first=5, count=4)
    assert [partners(group, worker) for worker in range(3)] == [[1, 2], [0, 2], [0, 1]]


def slowest(*rates: int, hosts: tuple[Host, ...] = (HERE, HERE, OTHER_CONTAINER, OTHER_CONTAINER)) -> int:
    """By what each member has measured, in bytes a second."""
    return min(host_rates(statuses_of(rates, hosts)).values(), default=0)


def statuses_of(rates: Sequence[int], hosts: Sequence[Host]) -> list[Status]:
    return [Status(host, b"n" * 16, TOKEN, frozenset(), rate) for host, rate in zip(hosts, rates, strict=True)]


def owners(*rates: int, num_hosts: int) -> tuple[int, ...]:
    """By what each member has measured; hosts have evenly many, which are neighbors."""
    hosts = [Host(b"a kernel", b"%8d" % (rank * num_hosts // len(rates))) for rank in range(len(rates))]
    statuses = statuses_of(rates, hosts)
    return choose_owners(statuses, host_rates(statuses))


def test_smaller_buckets_are_folded_by_host_on_a_slower_link() -> None:
    half_a_gigabit = 62_500_000  # each of two members measures half of the link's rate
    assert slowest(10**10, 10**10, half_a_gigabit, half_a_gigabit) == 125_000_000
    assert smallest_grouped(125_000_000) == int(125_000_000 * HOP_SECONDS)
    assert smallest_grouped(1_000_000) == DIRECT_BYTES
    assert smallest_grouped(10**10) == MIN_SHARED_BYTES


def test_what_is_not_measured_by_all_decides_nothing() -> None:
    assert slowest(10**6, 10**6, 10**6, 0) == 0
    assert slowest(10**6, 10**6, hosts=(HERE, HERE)) == 0
    assert smallest_grouped(0) == MIN_SHARED_BYTES


def test_one_measurement_that_is_far_off_decides_nothing() -> None:
    hosts = (HERE, HERE, HERE, OTHER_CONTAINER, OTHER_CONTAINER, OTHER_CONTAINER)
    assert slowest(10**6, 10**6, 10**15, 10**15, 10**6, 10**6, hosts=hosts) == 3 * 10**6


def test_workers_behind_a_slow_link_own_nothing() -> None:
    assert owners(1000, 1000, 1000, 100, num_hosts=4) == (0, 1, 2)
    assert owners(500, 500, 50, 50, 500, 500, num_hosts=3) == (0, 1, 4, 5)
    assert owners(1000, 100, 1000, 100, num_hosts=4) == (0, 2)


def test_all_own_evenly_many_where_no_link_is_slow_or_nothing_would_be_gained() -> None:
    assert owners(1000, 900, 800, 334, num_hosts=4) == ()
    assert owners(1000, 100, num_hosts=2) == ()
    assert owners(1000, 1000, 1000, 0, num_hosts=4) == (), "not all have measured"


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=9))
def test_at_least_half_of_the_hosts_own(rates: list[int]) -> None:
    assert not (owning := owners(*rates, num_hosts=len(rates))) or 2 * len(owning) >= len(rates)


def test_a_rate_is_that_of_links_to_other_hosts_in_this_generation() -> None:
    earlier = {1: Traffic(10**9, 1), 2: Traffic(10**9, 1)}
    now = {
        1: Traffic(2 * 10**9, 2),
        2: Traffic(10**9 + MEASURED_BYTES, 1_000_001),
        3: Traffic(MEASURED_BYTES, 2_000_000),
    }
    assert rate_of(now, earlier, {2, 3}) == MEASURED_BYTES * 3 // 2
    assert rate_of(now, now, {2, 3}) == 0
    short_of_it = now | {2: Traffic(10**9 + MEASURED_BYTES - 1, 1_000_001)}
    assert rate_of(short_of_it, earlier, {2}) == 0


def measure(group: Group, rates: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each link of a worker carry that many bytes a second."""
    for node, rate in zip(group.nodes, rates, strict=True):
        for link in node.poller.links.values():
            readings = map(Traffic, count(step=MEASURED_BYTES), count(step=MEASURED_BYTES * 1_000_000 // rate))
            monkeypatch.setattr(link, "traffic", readings.__next__)


@pytest.mark.parametrize("num_leaves", [4, 7])
def test_sums_keep_their_bits_when_a_slow_worker_owns_nothing(num_leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [Host(b"kernel %d" % worker, b"anothern") for worker in range(4)]
    group = Group(4, agreement=lambda worker: MemoryAgreement(worker, host=hosts[worker]))
    measure(group, [10**6, 10**6, 10**5, 10**6], monkeypatch)
    work, members = make_work(num_leaves, [60_000, 40_001, 7]), [0, 1, 2, 3]
    for number in range(4):
        check_round(group, members, Tag(1, number), work)
    rounds = [node.begin(work.spec(w, members, Tag(1, 4))) for w, node in enumerate(group.nodes)]
    assert {open_round.path for open_round in rounds} == {
        "over TCP; the links of the slowest host carry 2.4 Mbit/s; the sums are divided among 3 workers with faster "
        "links"
    }
    assert [
        node.agreement and node.agreement.begin(work.spec(w, members, Tag(1, 4))).sharing.owners
        for w, node in enumerate(group.nodes)
    ] == [(0, 1, 3)] * 4
    group.close()


def test_all_members_draw_the_same_conclusion_from_what_each_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the measurements differ: which buckets are folded by host must be equal on all."""
    elsewhere = Host(b"a kernel", b"anothern")
    hosts = (HERE, HERE, elsewhere, elsewhere)
    group = Group(4, agreement=lambda worker: MemoryAgreement(worker, host=hosts[worker]))
    measure(group, [1_000_000 << worker for worker in range(4)], monkeypatch)
    run_rounds(group, [0, 1, 2, 3], generation=1, first=0, count=6)
    rounds = [node.begin(WORK.spec(w, [0, 1, 2, 3], Tag(1, 6))) for w, node in enumerate(group.nodes)]
    assert {open_round.path for open_round in rounds} == {
        "shared memory within 2 groups of 2 workers and one fold per group over TCP for buckets of 32 KiB and more, "
        "TCP for smaller ones; the links of the slowest host carry 31 Mbit/s"
    }
    assert {
        node.agreement and node.agreement.begin(WORK.spec(w, [0, 1, 2, 3], Tag(1, 6))).sharing
        for w, node in enumerate(group.nodes)
    } == {Sharing(((0, 1), (2, 3)), DIRECT_BYTES)}
    group.close()


def racks(near: Sequence[int], far: Sequence[int], names: str, *, num_hosts: int) -> tuple[tuple[int, ...], ...]:
    """By what each member has measured inside its rack and beyond; hosts have evenly many, which are neighbors."""
    return choose_racks(
        [
            Status(
                Host(b"a kernel", b"%8d" % (rank * num_hosts // len(names))),
                b"n" * 16,
                b"t" * TOKEN_BYTES,
                frozenset(),
                near[rank],
                rack_of((name,)),
                far[rank],
            )
            for rank, name in enumerate(names)
        ],
        (),
    )


def test_racks_count_where_links_between_them_are_slow() -> None:
    assert racks([100] * 4, [99] * 4, "aabb", num_hosts=4) == ((0, 1), (2, 3)), "one link of 100, two of 49"
    assert racks([100] * 4, [110] * 4, "aabb", num_hosts=4) == ()
    assert racks([100] * 4, [30] * 4, "abab", num_hosts=4) == ((0, 2), (1, 3))
    assert racks([100, 100, 0], [30, 30, 30], "aab", num_hosts=3) == ((0, 1), (2,)), "it has no other host in its rack"


def test_racks_make_no_difference_where_it_is_not_known_or_nothing_is_gained() -> None:
    assert racks([100] * 4, [30, 30, 30, 0], "aabb", num_hosts=4) == (), "not all have measured"
    assert racks([0] * 4, [30] * 4, "abcd", num_hosts=4) == (), "one host in each"
    assert racks([0] * 4, [30] * 4, "aabb", num_hosts=2) == (), "one host in each"
    assert racks([100] * 4, [0] * 4, "aaaa", num_hosts=4) == (), "one rack"
    assert rack_of(()) == rack_of(("", "")) == NO_RACK


def test_a_host_whose_workers_name_different_racks_is_in_one() -> None:
    statuses = [
        Status(Host(b"a kernel", b"%8d" % (rank // 2)), b"n" * 16, TOKEN, frozenset(), 100, rack_of((name,)), 30)
        for rank, name in enumerate("abaabb")
    ]
    assert choose_racks(statuses, ((0, 1), (2, 3), (4, 5))) == ((0, 1, 2, 3), (4, 5))


@pytest.mark.parametrize("labels", ["aabb", "abab"])
def test_all_members_fold_by_rack_in_the_same_round_and_sums_keep_their_bits(
    labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [Host(b"kernel %d" % worker, b"anothern") for worker in range(4)]
    group = Group(
        4, agreement=lambda worker: MemoryAgreement(worker, host=hosts[worker], rack=rack_of((labels[worker],)))
    )
    for worker, node in enumerate(group.nodes):
        for peer, link in node.poller.links.items():
            rate = 10**6 if labels[peer] == labels[worker] else 10**5
            readings = map(Traffic, count(step=MEASURED_BYTES), count(step=MEASURED_BYTES * 1_000_000 // rate))
            monkeypatch.setattr(link, "traffic", readings.__next__)
    work, members = make_work(7, [60_000, 40_001, 7]), [0, 1, 2, 3]
    seen = []
    for number in range(6):
        check_round(group, members, Tag(1, number), work)
        agreements = [node.agreement for node in group.nodes]
        seen.append(
            {a.begin(work.spec(w, members, Tag(1, number))).sharing.racks for w, a in enumerate(agreements) if a}
        )
    expected = {"aabb": ((0, 1), (2, 3)), "abab": ((0, 2), (1, 3))}[labels]
    assert seen[0] == {()}
    assert seen[-1] == {expected}
    assert all(len(racks) == 1 for racks in seen)
    rounds = [node.begin(work.spec(w, members, Tag(1, 6))) for w, node in enumerate(group.nodes)]
    assert {open_round.path for open_round in rounds} == {
        "one fold per rack over TCP (2 racks) for buckets of 32 KiB and more, TCP for smaller ones; the links of the "
        "slowest host carry 9.6 Mbit/s"
    }
    group.close()


def test_small_buckets_need_no_segment(connect: Connect) -> None:
    group = connect(HERE, HERE)
    before = segments_in_use()
    for number in range(4):
        check_round(group, [0, 1], Tag(1, number), make_work(2, [20_000]))
    assert segments_in_use() == before


def test_a_member_left_behind_reads_what_its_generation_wrote(connect: Connect) -> None:
    """Whatever later generations do: what it may read is never written to again, and they share other memory."""
    group = connect(HERE, HERE, HERE)
    run_rounds(group, [0, 1, 2], generation=1, first=0, count=4)
    left_behind = group.nodes[2].agreement
    assert left_behind is not None
    spec = WORK.spec(2, [0, 1, 2], Tag(1, 4))
    memory = left_behind.begin(spec)  # it is frozen here, in the middle of a round
    group.nodes[0].poller.abort_round(2, "frozen", generation=1)
    calls = [start(lambda w=w: group.nodes[w].run_round(WORK.spec(w, [0, 1, 2], Tag(1, 4)))) for w in (0, 1)]
    assert [abandoned(call).suspect for call in calls] == [2, 2]
    seen = {rank: segment.array_at(0, 100_000, torch.uint8).copy() for rank, segment in memory.segments.items()}
    for generation in (2, 3):
        work = make_work(4, [60_000, 40_001], seed=generation)
        for number in range(8):
            check_round(group, [0, 1], Tag(generation, 4 + number), work)
        assert partners(group, 0) == [1]
    for rank in (0, 1):
        assert np.array_equal(memory.segments[rank].array_at(0, 100_000, torch.uint8), seen[rank])


def segments_of(group: Group, worker: int) -> list[int]:
    """What tells the segments apart that ``worker`` has made and mapped."""
    agreement = group.nodes[worker].agreement
    assert agreement is not None
    return [id(agreement._own), *(id(segment) for _, segment in agreement._mapped.values())]


def test_members_that_stay_use_their_segments_again_in_the_second_round(connect: Connect) -> None:
    """After a shrink and after a loss: making and mapping memory takes longer than an iteration."""
    group = connect(HERE, HERE, HERE, HERE)
    run_rounds(group, [0, 1, 2, 3], generation=1, first=0)
    before = segments_of(group, 0)
    assert group.nodes[3].agreement is not None
    group.nodes[3].agreement.close()  # as a leaver does
    check_round(group, [0, 1, 2], Tag(2, 3), WORK)
    assert [partners(group, worker) for worker in range(3)] == [[1, 2], [0, 2], [0, 1]]
    assert segments_of(group, 0) == before[:3]
    check_round(group, [0, 1, 2], Tag(2, 4), WORK)

    group.nodes[0].poller.abort_round(2, "lost", generation=2)
    calls = [start(lambda w=w: group.nodes[w].run_round(WORK.spec(w, [0, 1, 2], Tag(2, 5)))) for w in (0, 1, 2)]
    assert [abandoned(call).suspect for call in calls] == [2, 2, 2]
    assert group.nodes[2].agreement is not None
    group.nodes[2].agreement.close()  # as the kernel does
    check_round(group, [0, 1], Tag(3, 5), WORK)
    assert [partners(group, worker) for worker in range(2)] == [[1], [0]]
    assert segments_of(group, 0) == before[:2]
    check_round(group, [0, 1], Tag(3, 6), WORK)


def test_a_joiner_is_added_to_those_who_share_memory_already(connect: Connect) -> None:
    group = connect(HERE, HERE, HERE)
    run_rounds(group, [0, 1], generation=1, first=0)
    before, joiner = segments_of(group, 0), group.nodes[2].agreement
    assert joiner is not None
    joiner.prewarm(num_bytes=1 << 20)
    made = joiner._own
    check_round(group, [0, 1, 2], Tag(2, 3), WORK)
    assert [partners(group, worker) for worker in range(3)] == [[1], [0], []]
    run_rounds(group, [0, 1, 2], generation=2, first=4, count=2)
    assert [partners(group, worker) for worker in range(3)] == [[1, 2], [0, 2], [0, 1]]
    assert segments_of(group, 0)[:2] == before
    assert joiner._own is made


def test_memory_is_prewarmed_for_large_buckets_alone(connect: Connect) -> None:
    group, before = connect(HERE, NOWHERE), segments_in_use()
    for node, num_bytes in zip(group.nodes, (1000, 1 << 20), strict=True):
        assert node.agreement is not None
        node.agreement.prewarm(num_bytes=num_bytes)
    assert segments_in_use() == before


def resident_bytes() -> int:
    """Of the segments that this process maps, the bytes whose pages it has mapped."""
    blocks = re.findall(r"memfd:resile.*?Rss: *(\d+) kB", Path("/proc/self/smaps").read_text(), re.DOTALL)
    return sum(map(int, blocks)) << 10


def test_a_joiner_maps_the_part_of_its_segment_that_its_model_needs(connect: Connect) -> None:
    """Of pieces and of results, and not 20 MiB: each page costs microseconds."""
    (node,) = connect(HERE).nodes
    assert node.agreement is not None
    before = resident_bytes()
    node.agreement.prewarm(num_bytes=1 << 20)
    assert 2 << 20 <= resident_bytes() - before <= (2 << 20) + mmap.PAGESIZE  # results begin within a page


def test_a_segment_that_a_member_does_not_name_any_more_counts_as_not_mapped(connect: Connect) -> None:
    """A member that was behind in a failed generation may know an older one."""
    group = connect(HERE, HERE)
    run_rounds(group, [0, 1], generation=1, first=0)
    other = group.nodes[1].agreement
    assert other is not None
    other._drop_own()
    check_round(group, [0, 1], Tag(2, 3), WORK)
    assert partners(group, 0) == partners(group, 1) == []
    run_rounds(group, [0, 1], generation=2, first=4)
    assert [partners(group, worker) for worker in range(2)] == [[1], [0]]


def test_a_member_that_may_not_name_its_segment_any_more_keeps_nobody_else_from_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = connect(HERE, HERE, HERE)
    run_rounds(group, [0, 1, 2], generation=1, first=0)
    agreement = group.nodes[1].agreement
    assert agreement is not None
    monkeypatch.setattr(agreement, "_strangers", lambda own: {9})
    monkeypatch.setattr(agreement, "_drop_own", lambda: agreement._fail(PermissionError("memfd_create is forbidden")))
    run_rounds(group, [0, 1, 2], generation=2, first=4, count=3)
    assert [partners(group, worker) for worker in range(3)] == [[2], [], [0]]


def test_a_leaver_that_is_called_back_shares_memory_again(connect: Connect) -> None:
    """Its mailbox is another one then."""
    group = connect(HERE, HERE)
    run_rounds(group, [0, 1], generation=1, first=0)
    agreement = group.nodes[1].agreement
    assert agreement is not None
    agreement.close()
    run_rounds(group, [0, 1], generation=2, first=4, count=4)
    assert [partners(group, worker) for worker in range(2)] == [[1], [0]]


def test_descriptors_and_memory_do_not_grow_with_rounds_and_generations(connect: Connect) -> None:
    group = connect(HERE, HERE, HERE)
    before = num_descriptors()
    run_rounds(group, [0, 1, 2], generation=1, first=0, count=4)
    descriptors, segments = num_descriptors(), segments_in_use()
    for generation in range(2, 5):
        run_rounds(group, [0, 1, 2], generation=generation, first=4 * generation, count=4)
    assert num_descriptors() <= descriptors
    assert segments_in_use() <= segments
    # A mailbox and a segment for each worker, and two ends of a lease for each pair, in both directions.
    assert descriptors - before == 3 * 2 + 6 * 2
    for node in group.nodes:
        assert node.agreement is not None
        node.agreement.close()
    assert num_descriptors() == before


def test_a_lease_ends_when_the_reader_is_killed_and_not_while_it_is_frozen() -> None:
    """As the kernel sees to it, whatever the reader was doing."""
    own, sender, receiver = OwnSegment(1 << 16), Mailbox(), Mailbox()
    own.send(sender, receiver.name, worker=5, generation=1)
    mapped, has_mapped = os.pipe()
    child = os.fork()
    if not child:
        received = receiver.take(own.token)
        assert received is not None
        segment = map_segment(received.memory, 1 << 16, received.lease)
        os.write(has_mapped, b"1")
        while segment.num_bytes:
            signal.pause()
    try:
        os.read(mapped, 1)
        receiver.close()
        os.kill(child, signal.SIGSTOP)
        assert own.readers() == {5}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert own.readers() == set()
    for end in (mapped, has_mapped):
        os.close(end)
    own.close()
    sender.close()


def test_processes_that_read_ahead_hold_no_lease() -> None:
    own, sender, receiver = OwnSegment(1 << 16), Mailbox(), Mailbox()
    own.send(sender, receiver.name, worker=5, generation=1)
    received = receiver.take(own.token)
    assert received is not None
    segment = map_segment(received.memory, 1 << 16, received.lease)
    os.close(received.memory)
    runs, goes_on = multiprocessing.get_context("fork").Event(), multiprocessing.get_context("fork").Event()

    def read_ahead() -> None:
        runs.set()
        goes_on.wait()

    child = multiprocessing.get_context("fork").Process(target=read_ahead, daemon=True)
    child.start()
    runs.wait()
    assert own.readers() == {5}
    assert segment.num_bytes == 1 << 16
    del segment
    assert own.readers() == set()
    goes_on.set()
    child.join()
    own.close()
    for mailbox in (sender, receiver):
        mailbox.close()


@pytest.mark.parametrize("sharing", [[0, 1, 2], [0, 2]])
@pytest.mark.parametrize("num_leaves", [1, 7])
def test_slots_are_used_again_when_all_have_read_them(num_leaves: int, sharing: list[int]) -> None:
    """Also by members without pieces, which only read sums."""
    group = sharing_group(3, sharing)
    for number in range(2):
        work = make_work(num_leaves, [500_000, 9, 700_001, 100_000], seed=number)
        check_round(group, [0, 1, 2], Tag(1, number), work)
    group.close()


@pytest.mark.parametrize("num_members", [2, 8, 64])
def test_a_segment_is_bounded_whatever_the_model(num_members: int) -> None:
    assert Sharing((tuple(range(num_members)),)).segment_bytes <= 2 * NUM_STAGE_BUFFERS * STAGE_BYTES


def test_without_memory_for_segments_the_exchange_goes_on_over_tcp(connect: Connect) -> None:
    reasons: list[str] = []
    group = connect(HERE, HERE, report=reasons.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        run_rounds(group, [0, 1], generation=1, first=0, count=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert partners(group, 0) == partners(group, 1) == []
    assert len(reasons) == 2
    assert all("exchange gradients over TCP, and not in shared memory: [Errno 27]" in reason for reason in reasons)
    path = group.nodes[0].begin(WORK.spec(0, [0, 1], Tag(1, 5))).path
    assert path.startswith("over TCP; not all workers of a host share memory: [Errno 27]")


def test_a_worker_that_may_make_no_segment_does_not_keep_the_others_from_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    group = connect(HERE, HERE, HERE, report=reasons.append)
    agreement = group.nodes[1].agreement
    assert agreement is not None
    monkeypatch.setattr(agreement, "_offer", lambda: agreement._fail(PermissionError("memfd_create is forbidden")))
    run_rounds(group, [0, 1, 2], generation=1, first=0, count=5)
    assert [partners(group, worker) for worker in range(3)] == [[2], [], [0]]
    assert len(reasons) == 1
    assert "memfd_create is forbidden" in reasons[0]
    path = group.nodes[1].begin(WORK.spec(1, [0, 1, 2], Tag(1, 5))).path
    assert path == (
        "shared memory within 2 groups of 1 to 2 workers and one fold per group over TCP for buckets of 128 KiB and "
        "more, TCP for smaller ones; not all workers of a host share memory: memfd_create is forbidden"
    )


def test_a_single_worker_exchanges_nothing(connect: Connect) -> None:
    group = connect(HERE)
    run_rounds(group, [0], generation=1, first=0)
    assert group.nodes[0].begin(make_work(4, [9]).spec(0, [0], Tag(1, 3))).path == ""


def test_memory_is_used_only_where_both_have_mapped_the_other(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that cannot map segments makes one all the same."""
    group = connect(HERE, HERE, HERE)
    monkeypatch.setattr(group.nodes[1].agreement, "_map", lambda: None)
    run_rounds(group, [0, 1, 2], generation=1, first=0, count=5)
    assert [partners(group, worker) for worker in range(3)] == [[2], [], [0]]


def test_a_failed_round_ends_what_was_agreed(connect: Connect) -> None:
    group = connect(HERE, HERE)
    run_rounds(group, [0, 1], generation=1, first=0)
    assert partners(group, 0) == [1]
    group.nodes[0].poller.abort_round(1, "frozen", generation=1)
    calls = [start(lambda w=w: group.nodes[w].run_round(WORK.spec(w, [0, 1], Tag(1, 3)))) for w in (0, 1)]
    assert [abandoned(call).suspect for call in calls] == [1, 1]
    assert partners(group, 0) == partners(group, 1) == []


def test_generations_that_fail_in_their_first_round_leave_no_descriptors(connect: Connect) -> None:
    group = connect(HERE, HERE)
    run_rounds(group, [0, 1], generation=1, first=0, count=4)
    before = num_descriptors()
    for generation in range(2, 6):
        for worker, node in enumerate(group.nodes):
            assert node.agreement is not None
            node.agreement.begin(WORK.spec(worker, [0, 1], Tag(generation, 4)))
            node.agreement.end()
    run_rounds(group, [0, 1], generation=6, first=4, count=4)
    assert partners(group, 0) == [1]
    assert num_descriptors() == before


def test_workers_in_two_containers_of_one_host_say_why_they_use_tcp(connect: Connect) -> None:
    reasons: list[str] = []
    group = connect(HERE, OTHER_CONTAINER, report=reasons.append)
    run_rounds(group, [0, 1], generation=1, first=0, count=4)
    assert partners(group, 0) == partners(group, 1) == []
    assert len(set(reasons)) == 1
    assert "different containers" in reasons[0]


def test_only_the_owner_can_write_to_a_segment_and_nobody_can_resize_it() -> None:
    segment, fd = create_segment(1 << 16)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 1 << 16)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    reader = map_segment(fd, 1 << 16)
    segment.array_at(64, 4, torch.float32)[:] = 7.0
    assert reader.array_at(64, 4, torch.float32).tolist() == [7.0] * 4
    with pytest.raises(OSError, match="another size"):
        map_segment(fd, 1 << 15)
    os.close(fd)


def test_memory_that_its_maker_could_shrink_is_refused() -> None:
    """Reading it could end this process."""
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="not sealed"):
        map_segment(fd, 4096)
    os.close(fd)


def test_a_child_of_the_script_has_no_segment() -> None:
    segment, fd = create_segment(1 << 16)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)
    assert segments_in_use() > 0
    child = os.fork()
    if not child:
        os._exit(b"memfd:resile" in Path("/proc/self/maps").read_bytes())
    assert os.waitpid(child, 0)[1] == 0
    assert segment.num_bytes == 1 << 16


def test_a_mailbox_keeps_what_a_token_names_and_a_bounded_number_of_others() -> None:
    one, other = Mailbox(), Mailbox()
    before = num_descriptors()
    _, fd = create_segment(4096)

    def send(token: bytes, generation: int = 0, fds: Sequence[int] = (fd, fd)) -> None:
        one.send(other.name, token, fds, generation=generation)

    for number in range(3):
        send(bytes([number]) * TOKEN_BYTES)
    send(bytes([1]) * TOKEN_BYTES)  # again
    send(b"too short")
    send(bytes([9]) * TOKEN_BYTES, fds=[fd])  # without a lease
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stranger.sendto(b"noise", b"\0resile/" + other.name)
    taken = other.take(bytes([1]) * TOKEN_BYTES)
    assert taken is not None
    for descriptor in taken:
        os.close(descriptor)
    assert other.take(bytes([9]) * TOKEN_BYTES) is None
    assert num_descriptors() == before + 1 + 1 + 2 * 2  # the segment, the stranger, and what nobody has taken
    newer, older, late = (bytes([number]) * TOKEN_BYTES for number in (10, 11, 12))
    send(newer, 8)
    send(older, 7)
    other.drop_before(8)
    send(late, 7)
    assert other.take(older) is other.take(late) is None
    kept = other.take(newer)
    assert kept is not None
    for descriptor in kept:
        os.close(descriptor)
    for resource_ in (one, other, stranger):
        resource_.close()
    os.close(fd)
    assert num_descriptors() == before - 2


def test_a_worker_without_room_for_a_descriptor_says_so(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes the message and drops the descriptor; its sender does not learn of it."""
    one, other = Mailbox(), Mailbox()
    _, fd = create_segment(4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(fd)
    os.close(lowest_free)
    for room in (0, 1):  # for none of both, and for one
        one.send(other.name, TOKEN, [fd, fd], generation=0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + room, hard))
        try:
            with pytest.raises(OSError, match="Too many open files") as raised:
                other.take(TOKEN)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    one.send(other.name, TOKEN, [fd, fd], generation=0)
    taken = other.take(TOKEN)
    assert taken is not None
    for descriptor in (fd, *taken):
        os.close(descriptor)
    one.close()
    other.close()

    def take(mailbox: Mailbox, token: bytes) -> None:
        raise raised.value

    monkeypatch.setattr(Mailbox, "take", take)
    reasons: list[str] = []
    group = connect(HERE, HERE, report=reasons.append)
    run_rounds(group, [0, 1], generation=1, first=0, count=5)
    assert partners(group, 0) == partners(group, 1) == []
    assert len(reasons) == 2
    assert all("[Errno 24] Too many open files" in reason for reason in reasons)


def test_a_status_survives_encoding() -> None:
    status = Status(HERE, b"n" * 16, TOKEN, frozenset({0, 8, 12}), digest=b"eight...")
    assert decode_status(status.encode(13)) == status
    assert len(status.encode(13)) == status_bytes(13)
    assert len(status.encode(13)) == len(status._replace(mapped=frozenset()).encode(13))


@given(st.integers(0, 1 << 62))
def test_a_rate_is_known_to_one_part_in_eight(rate: int) -> None:
    status = decode_status(Status(HERE, b"n" * 16, TOKEN, frozenset(), rate).encode(1))
    assert abs(status.rate - rate) <= max(rate / 8, 8)
    far = Status(HERE, b"n" * 16, TOKEN, frozenset(), 0, rack_of(("a", "b")), status.rate)
    assert decode_status(far.encode(1)) == far
    assert decode_status(status.encode(1)) == status
