"""Buckets that are folded by host: in every order of events all members get the sums of the tree, and nobody waits."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.collectives.blocks import NOT_SHARED, WINDOW, Block, Shape, Sharing, Transfer, grown_groups
from resile_learner.collectives.layout import layout
from resile_learner.collectives.spec import Abandoned, RoundSpec, Tag
from resile_learner.collectives.tree import Interval, fold_values, folding, pieces, ranges

from .link_group import AgreedMemory, SharedFromTheStart, Work, make_work, same_bits
from .scheduled_rounds import PAYLOAD_BYTES, Schedule, small_blocks

Hosts = Sequence[Collection[int]]
SIZES = (9, 700, 201, 1000, 400)
MIN_SHARED_BYTES = (1, 2000)  # all of these are folded by host, except the first; or only the largest
STAGE_BYTES = (1, 4 * PAYLOAD_BYTES)  # one block in a stage, or four


@pytest.fixture(scope="module", autouse=True)
def blocks_are_small() -> Iterator[None]:
    with small_blocks():
        yield


def schedule(
    num_members: int,
    hosts: Hosts,
    later: Hosts | None = None,
    *,
    owners: Collection[int] = (),
    racks: Sequence[int] = (),
    later_racks: Sequence[int] = (),
    seed: int,
) -> Schedule:
    limits = {"min_bytes": MIN_SHARED_BYTES[seed % 2], "stage_bytes": STAGE_BYTES[seed // 2 % 2]}
    shared = SharedFromTheStart(hosts, later, owners=tuple(owners), racks=(racks, later_racks or racks), **limits)
    return Schedule(num_members, lambda worker: AgreedMemory(worker, shared), seed)


def round_of(group: Schedule, spec: RoundSpec, worker: int, *, may_leave: bool = False) -> Callable[[], object]:
    """A round in which others go on between any two buckets."""

    def run() -> object:
        open_round = group.nodes[worker].begin(spec)
        for bucket in range(len(spec.sums)):
            group.pause(worker)
            open_round.push(bucket)
        return open_round.finish(b"from %d" % worker, may_leave=may_leave)

    return run


def specs_of(work: Work, members: Sequence[int], tag: Tag) -> dict[int, RoundSpec]:
    return {worker: work.spec(worker, members, tag, in_place=bool(worker % 2)) for worker in members}


def check(specs: dict[int, RoundSpec], work: Work, results: dict[int, object]) -> None:
    headers = tuple(b"from %d" % worker for worker in specs)
    assert results == dict.fromkeys(specs, headers)
    for worker, spec in specs.items():
        for bucket, expected in enumerate(work.sums()):
            assert same_bits(spec.sums[bucket], expected), f"bucket {bucket} of worker {worker}"


def hosts_of(places: Sequence[int]) -> list[list[int]]:
    """The workers of each host; those at place 0 share memory with nobody."""
    return [[worker for worker, place in enumerate(places) if place == host] for host in range(1, 4)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=7),
    st.one_of(st.just([]), st.lists(st.integers(0, 2), min_size=7, max_size=7)),
    st.sets(st.integers(0, 6)),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_sums_have_the_bits_of_the_tree_in_any_order_of_events(
    places: list[int], racks: list[int], slow: set[int], num_leaves: int, seed: int
) -> None:
    """Rounds overlap: a member begins the next one when it has completed its own. Those that are slow own nothing."""
    members = range(len(places))
    owners = [worker for worker in members if worker not in slow]
    group = schedule(len(members), hosts_of(places), owners=owners, racks=racks, seed=seed)
    works = [make_work(num_leaves, SIZES, seed=number) for number in range(2)]
    specs = [specs_of(work, members, Tag(1, number)) for number, work in enumerate(works)]

    def run_both(worker: int) -> object:
        return [round_of(group, specs[number][worker], worker)() for number in range(2)]

    results = group.run({worker: partial(run_both, worker) for worker in members})
    for number, work in enumerate(works):
        assert not any(isinstance(result, Exception) for result in results.values()), results
        check(specs[number], work, {worker: result[number] for worker, result in results.items()})  # type: ignore[index]
    group.close()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=6),
    st.lists(st.integers(0, 1), min_size=6, max_size=6),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_a_group_may_grow_between_two_rounds(
    places: list[int], racks: list[int], joined: bool, num_leaves: int, seed: int
) -> None:
    """Whoever maps the others' segments late overwrites nothing that is still read. Racks may count from then on."""
    members = range(len(places))
    hosts = hosts_of(places)
    group = schedule(len(members), hosts, [members] if joined else hosts, later_racks=racks, seed=seed)
    works = [make_work(num_leaves, SIZES, seed=number) for number in range(2)]
    specs = [specs_of(work, members, Tag(1, number)) for number, work in enumerate(works)]

    def run_both(worker: int) -> object:
        return [round_of(group, specs[number][worker], worker)() for number in range(2)]

    group.run({worker: partial(run_both, worker) for worker in members})
    for number, work in enumerate(works):
        for spec in specs[number].values():
            assert all(map(same_bits, spec.sums, work.sums()))
    group.close()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=3, max_size=6),
    st.sets(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_who_stays_may_go_on_in_the_same_memory_since_who_leaves_has_read_it(
    places: list[int], leavers: set[int], num_leaves: int, seed: int
) -> None:
    members = range(len(places))
    stayers = [worker for worker in members if worker not in leavers]
    group = schedule(len(members), hosts_of(places), seed=seed)
    works = [make_work(num_leaves, SIZES, seed=number) for number in range(2)]
    specs = [specs_of(works[0], members, Tag(1, 0)), specs_of(works[1], stayers, Tag(1, 1))]

    def run_all(worker: int) -> object:
        rounds = [specs[number][worker] for number in range(2) if worker in specs[number]]
        return [round_of(group, spec, worker, may_leave=len(rounds) == 1)() for spec in rounds]

    results = group.run({worker: partial(run_all, worker) for worker in members})
    assert not any(isinstance(result, Exception) for result in results.values()), results
    for work, by_worker in zip(works, specs, strict=True):
        for spec in by_worker.values():
            assert all(map(same_bits, spec.sums, work.sums()))
    group.close()


TWO_HOSTS = [[0, 1], [2, 3, 4]]
OWNER, HEAD = 4, 2
"""The hosts' other rank is the head for none of the two blocks of the first host; this one is."""
TWO_RACKS = [0, 0, 0, 1, 1, 1]
HOSTS_IN_RACKS = [[0, 1], [3, 4]]
"""Workers 2 and 5 share memory with nobody."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("victim", [OWNER, HEAD])
@pytest.mark.parametrize("how", ["kill", "freeze", "cut"])
def test_nobody_waits_for_an_owner_that_is_lost_at_any_step(how: str, victim: int, seed: int) -> None:
    check_loss_at_any_step(how, victim, 5, TWO_HOSTS, seed=seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", [2, 4])
@pytest.mark.parametrize("how", ["kill", "freeze", "cut"])
def test_nobody_waits_for_a_head_of_a_rack_that_is_lost_at_any_step(how: str, victim: int, seed: int) -> None:
    """Each member is that for one owner in the other rack; the first one shares memory with nobody, the other does."""
    sharing = Sharing(((0, 1), (2,), (3, 4), (5,)))
    assert {sharing.head((0, 1, 2), owner) for owner in (3, 4, 5)} == {0, 1, 2}
    assert {sharing.head((3, 4, 5), owner) for owner in (0, 1, 2)} == {3, 4, 5}
    check_loss_at_any_step(how, victim, 6, HOSTS_IN_RACKS, racks=TWO_RACKS, seed=seed)


def check_loss_at_any_step(
    how: str, victim: int, num_members: int, hosts: Hosts, *, racks: Sequence[int] = (), seed: int
) -> None:
    """Of a frozen worker, or of one that nothing reaches, one survivor learns by the silence of its control link."""
    members = range(num_members)
    survivors = [worker for worker in members if worker != victim]
    work = make_work(7, (600, 300))
    step, was_lost = seed, True
    while was_lost:
        was_lost = False
        group = schedule(num_members, hosts, racks=racks, seed=seed)
        specs = specs_of(work, members, Tag(1, 0))

        def lose(now: int, group: Schedule = group, at: int = step) -> None:
            nonlocal was_lost
            if now == at:
                was_lost = True
                getattr(group, how)(victim)
            observer = next((worker for worker in survivors if worker in group.running), None)
            if now == at and how != "kill" and observer is not None:
                group.nodes[observer].poller.abort_round(victim, "silent", generation=1)
                group.wake(observer)

        results = group.run({worker: round_of(group, specs[worker], worker) for worker in members}, lose)
        for worker in survivors:
            result = results[worker]
            if isinstance(result, Abandoned):
                assert result.suspect == victim
            else:  # it had all before
                assert not isinstance(result, Exception), result
                assert all(map(same_bits, specs[worker].sums, work.sums()))
        again = specs_of(work, survivors, Tag(2, 0))
        check(again, work, group.run({worker: round_of(group, again[worker], worker) for worker in survivors}))
        group.close()
        step += 4
    assert step > 40


def held_by(num_ranks: int, num_leaves: int) -> tuple[tuple[Interval, ...], ...]:
    return tuple(pieces(num_leaves, range_) for range_ in ranges(num_leaves, num_ranks))


def crossing(num_leaves: int, num_elements: int, num_ranks: int, sharing: Sharing, hosts: Hosts) -> int:
    """The bytes of pieces and sums that all hosts send to others."""
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    total = 0
    for rank in range(num_ranks):
        plan = layout(held_by(num_ranks, num_leaves), num_leaves, (Shape(num_elements, 4),), rank, sharing)
        for other, route in enumerate(plan.routes):
            for _, _, num_bytes, _ in (*route.pieces_in, *route.sums_in):
                if host_of[rank] != host_of[other]:
                    total += num_bytes
    return total


def moved_by(ranks: Collection[int], num_elements: int, num_ranks: int, sharing: Sharing) -> tuple[int, int]:
    """The bytes of pieces and sums that ``ranks`` together send to others and receive from others."""
    outward = inward = 0
    for rank in range(num_ranks):
        plan = layout(held_by(num_ranks, num_ranks), num_ranks, (Shape(num_elements, 4),), rank, sharing)
        for other, route in enumerate(plan.routes):
            for _, _, num_bytes, _ in (*route.pieces_in, *route.sums_in):
                outward += num_bytes * (other in ranks and rank not in ranks)
                inward += num_bytes * (rank in ranks and other not in ranks)
    return outward, inward


def test_a_host_that_owns_nothing_moves_each_bucket_once() -> None:
    hosts = ((0, 1), (2, 3), (4, 5), (6, 7))
    tensor = 48_000 * 4
    equal, relieved = (Sharing(hosts, min_bytes=1, owners=owners) for owners in ((), (0, 1, 2, 3, 4, 5)))
    assert moved_by((6, 7), 48_000, 8, equal) == pytest.approx((1.5 * tensor, 1.5 * tensor), rel=1e-2)
    assert moved_by((6, 7), 48_000, 8, relieved) == (tensor, tensor)
    assert moved_by((0, 1), 48_000, 8, relieved) == pytest.approx((5 / 3 * tensor, 5 / 3 * tensor), rel=1e-2)


def test_each_rack_crosses_the_link_once() -> None:
    """And the hosts' own links carry the same as without racks."""
    hosts, racks = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))
    tensor = 48_000 * 4
    by_host, by_rack = (Sharing(hosts, min_bytes=1, racks=chosen) for chosen in ((), racks))
    for rack in racks:
        assert moved_by(rack, 48_000, 8, by_host) == (2 * tensor, 2 * tensor)
        assert moved_by(rack, 48_000, 8, by_rack) == (tensor, tensor)
    for host in hosts:
        assert moved_by(host, 48_000, 8, by_host) == pytest.approx((1.5 * tensor, 1.5 * tensor), rel=1e-2)
        assert moved_by(host, 48_000, 8, by_rack) == pytest.approx((1.5 * tensor, 1.5 * tensor), rel=1e-2)


def test_ranks_behind_a_slow_link_are_no_heads_of_their_rack() -> None:
    hosts, racks = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))
    sharing = Sharing(hosts, owners=(0, 1, 2, 3, 4, 5), racks=racks)
    assert {sharing.head(racks[1], owner) for owner in range(4)} == {4, 5}


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=8), st.lists(st.integers(0, 2), min_size=8, max_size=8), st.data()
)
def test_every_rank_gets_each_sum_once_and_room_for_pieces_does_not_grow_with_racks(
    places: list[int], rack_of: list[int], data: st.DataObject
) -> None:
    num_ranks = len(places)
    groups = grouped(places)
    racks = racks_of(groups, rack_of)
    num_leaves = data.draw(st.integers(1, 12))
    held = held_by(num_ranks, num_leaves)
    sharing = Sharing(groups, min_bytes=1, racks=racks)
    for rank in range(num_ranks):
        plan = layout(held, num_leaves, (Shape(10_000, 4),), rank, sharing)
        sums = [place_of(frame) for route in plan.routes for frame in route.sums_in]
        inside = [block.place for stage in plan.stages for part in stage.parts for block in part.blocks]
        owned = [block.place for block in plan.blocks]
        assert len(set(sums)) == len(sums)
        assert {*sums, *owned, *inside} == set(range(max(*sums, *owned, *inside) + 1))
        for route in plan.routes:
            assert [frame.item for frame in route.pieces_in if frame.sum_index >= 0] == [
                sum_.item for sum_ in route.sums_out
            ]
            assert [frame.item for frame in route.pieces_out if frame.sum_index >= 0] == [
                sum_.item for sum_ in route.sums_in
            ]
        assert plan.received_bytes <= (num_ranks - 1) * WINDOW * (PAYLOAD_BYTES + 64)


def place_of(frame: Transfer) -> int:
    assert isinstance(frame.item, Block)
    return frame.item.place


def grouped(places: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """All ranks, by host."""
    alone = [[rank] for rank, place in enumerate(places) if not place]
    return tuple(map(tuple, filter(None, hosts_of(places) + alone)))


def racks_of(groups: Sequence[tuple[int, ...]], rack_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """All ranks, by the rack of the first rank of their group."""
    racks: dict[int, list[int]] = {}
    for group in groups:
        racks.setdefault(rack_of[group[0]], []).extend(group)
    return tuple(tuple(sorted(rack)) for rack in racks.values())


def test_each_host_crosses_the_link_once() -> None:
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    tensor = 40_000 * 4
    assert crossing(8, 40_000, 8, NOT_SHARED, hosts) == pytest.approx(2 * 4.0 * tensor, rel=1e-2)
    assert crossing(8, 40_000, 8, Sharing(hosts, min_bytes=1), hosts) == pytest.approx(2 * 1.0 * tensor, rel=1e-2)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.integers(1, 12))
def test_folding_by_host_never_sends_more_than_flat(places: list[int], num_leaves: int) -> None:
    hosts = grouped(places)
    by_host, flat = (
        crossing(num_leaves, 10_000, len(places), sharing, hosts)
        for sharing in (Sharing(hosts, min_bytes=1), NOT_SHARED)
    )
    assert by_host <= flat


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2**8 - 1))
def test_what_remains_of_some_pieces_completes_the_tree(num_leaves: int, num_ranks: int, chosen: int) -> None:
    """Folding inside, and then what remains, makes the additions of the tree."""
    held = held_by(num_ranks, num_leaves)
    results: list[tuple[tuple[Interval, ...], ...]] = []
    nodes: list[Interval] = []
    names: dict[Interval, str] = {}

    def name_of(node: Interval) -> str:
        found = pieces(num_leaves, node)
        assert found == (node,), "no node of the tree"
        return names.setdefault(node, f"{node.lo}-{node.hi}")

    for side in (0, 1):
        inside = tuple(nodes_ if chosen >> rank & 1 == side else () for rank, nodes_ in enumerate(held))
        results.append(inside)
        plan = folding(num_leaves, inside)
        nodes += plan.results
        assert sum(plan.counts) == len(plan.sources) == len(plan.steps) + len(plan.results)
        values = [held[rank][number] for rank, number in plan.sources]
        for left, right, result in plan.steps:
            assert values[left].hi == values[right].lo
            values[left] = Interval(values[left].lo, values[right].hi)
            name_of(values[left])
            assert result is None or plan.results[result] == values[left]
        for source, result in plan.unchanged:
            assert plan.results[result] == values[source]
    nodes.sort()
    total = fold_values(num_leaves, nodes, nodes, lambda one, two: Interval(one.lo, two.hi))
    assert total == Interval(0, num_leaves)


@given(st.lists(st.lists(st.sets(st.integers(0, 5)), min_size=6, max_size=6), min_size=1, max_size=5))
def test_groups_only_grow_and_all_in_one_share_memory(rounds: list[list[set[int]]]) -> None:
    mapped = [frozenset[int]()] * 6
    groups: tuple[tuple[int, ...], ...] = ()
    for news in rounds:
        mapped = [before | new for before, new in zip(mapped, news, strict=True)]
        older, groups = groups, grown_groups(groups, mapped)
        assert all(any(set(group) <= set(other) for other in groups) for group in older)
        assert all(two in mapped[one] for group in groups for one in group for two in group if one != two)
        assert not groups or sorted(rank for group in groups for rank in group) == list(range(6))
        assert groups == grown_groups(groups, mapped)
