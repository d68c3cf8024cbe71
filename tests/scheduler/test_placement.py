"""On which slots: nothing twice, nothing moved without need, few hosts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from random import Random
from types import MappingProxyType

import hypothesis.strategies as st
from hypothesis import given

from resile_scheduler.core.slots import placement
from resile_scheduler.core.slots.placement import Want
from resile_scheduler.core.state.slot_sets import SlotId, by_host
from resile_scheduler.core.state.topology import Domain, neighbors, num_places


def slots(**hosts: int) -> list[SlotId]:
    return [SlotId(host, number) for host, num in hosts.items() for number in range(num)]


def names(placed: tuple[SlotId, ...]) -> list[str]:
    return [slot.name for slot in placed]


def hosts(slots: Iterable[SlotId]) -> frozenset[str]:
    return frozenset(slot.host for slot in slots)


def place(
    wants: Sequence[Want],
    *,
    usable: Iterable[SlotId],
    free: Iterable[SlotId],
    domains: Mapping[str, Domain] = MappingProxyType({}),
) -> dict[str, tuple[SlotId, ...]]:
    """Place jobs that may keep what they hold of ``usable``; what is neither held nor free is released."""
    usable, free = set(usable), set(free)
    wants = [replace(want, held=tuple(slot for slot in want.held if slot in usable)) for want in wants]
    held = {slot for want in wants for slot in want.held}
    return placement.place(wants, free=by_host(free), released=by_host(usable - free - held), domains=domains)


TWO = slots(a=4, b=4)
ALL = frozenset("ab")


def test_a_job_keeps_what_it_has_and_gives_up_a_whole_host() -> None:
    held = (*slots(a=4), *slots(b=3))
    placed = place([Want("job-1", 4, held, hosts=ALL)], usable=TWO, free=())
    assert placed["job-1"] == tuple(slots(a=4))


def test_joiners_go_before_members() -> None:
    held = tuple(slots(a=2, b=2))
    want = Want("job-1", 3, held, joining=frozenset({SlotId("a", 0)}), hosts=ALL)
    assert SlotId("a", 0) not in place([want], usable=TWO, free=())["job-1"]


def test_what_one_gives_up_another_gets() -> None:
    wants = [Want("job-1", 4, tuple(TWO), hosts=ALL), Want("job-2", 4, hosts=ALL)]
    placed = place(wants, usable=TWO, free=())
    assert names(placed["job-1"]) == ["a/0", "a/1", "a/2", "a/3"]
    assert names(placed["job-2"]) == ["b/0", "b/1", "b/2", "b/3"]


def test_what_is_given_up_is_where_another_job_is_bound_to() -> None:
    held = tuple(TWO)
    for host in "ab":
        placed = place(
            [Want("job-1", 4, held, hosts=ALL), Want("job-2", 4, hosts=frozenset(host))], usable=TWO, free=()
        )
        assert {slot.host for slot in placed["job-2"]} == {host}
        assert len(placed["job-1"]) == len(placed["job-2"]) == 4


def test_no_more_is_given_up_there_than_the_other_job_lacks() -> None:
    usable = slots(a=4, b=4, c=4)
    wants = [
        Want("job-1", 6, tuple(slots(a=4, b=4)), hosts=hosts(usable), joining=frozenset(slots(b=4))),
        Want("job-2", 5, hosts=frozenset("ac")),
    ]
    placed = place(wants, usable=usable, free=slots(c=4))
    assert len(placed["job-2"]) == 5
    assert sorted(names(placed["job-1"])) == ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2"]


def test_free_slots_come_before_those_that_are_let_go() -> None:
    placed = place([Want("job-1", 2, hosts=ALL)], usable=TWO, free=slots(b=2))
    assert placed["job-1"] == tuple(slots(b=2))


def test_the_smallest_host_that_has_enough_is_taken() -> None:
    usable = slots(a=8, b=3, c=2)
    placed = place([Want("job-1", 3, hosts=hosts(usable))], usable=usable, free=usable)
    assert placed["job-1"] == tuple(slots(b=3))
    placed = place([Want("job-1", 10, hosts=hosts(usable))], usable=usable, free=usable)
    assert placed["job-1"] == (*slots(a=8), *slots(c=2))


def test_who_can_run_on_few_hosts_chooses_first() -> None:
    usable = slots(a=2, b=2)
    wants = [Want("job-1", 2, hosts=hosts(usable)), Want("job-2", 2, hosts=frozenset("a"))]
    placed = place(wants, usable=usable, free=usable)
    assert placed == {"job-1": tuple(slots(b=2)), "job-2": tuple(slots(a=2))} or placed["job-2"] == tuple(slots(a=2))
    assert placed["job-1"] == (SlotId("b", 0), SlotId("b", 1))


def test_slots_that_may_not_be_used_are_left() -> None:
    placed = place([Want("job-1", 4, tuple(slots(a=4)), hosts=frozenset("b"))], usable=slots(b=4), free=())
    assert placed["job-1"] == tuple(slots(b=4))


RACKS = {"a": ("x", "1"), "b": ("x", "1"), "c": ("x", "2"), "d": ("y", "3")}
"""The zone and the rack of each host."""


def test_a_job_starts_in_one_rack_though_slots_elsewhere_fit_better() -> None:
    usable = slots(a=2, b=2, c=3, d=3)
    placed = place([Want("job-1", 4, hosts=hosts(usable))], usable=usable, free=usable, domains=RACKS)
    assert placed["job-1"] == tuple(slots(a=2, b=2))


def test_a_job_that_no_rack_holds_stays_in_one_zone() -> None:
    usable = slots(a=1, b=1, c=2, d=3)
    placed = place([Want("job-1", 4, hosts=hosts(usable))], usable=usable, free=usable, domains=RACKS)
    assert hosts(placed["job-1"]) == frozenset("abc")


def test_a_job_grows_in_its_own_rack() -> None:
    usable = slots(a=2, b=2, c=1)
    want = Want("job-1", 3, tuple(slots(a=2)), hosts=hosts(usable))
    assert hosts(place([want], usable=usable, free=slots(b=2, c=1), domains=RACKS)["job-1"]) == frozenset("ab")


def test_a_job_gives_up_the_rack_where_it_has_fewest() -> None:
    held = tuple(slots(a=1, b=1, c=1))
    want = Want("job-1", 2, held, hosts=frozenset("abc"))
    assert place([want], usable=held, free=(), domains=RACKS)["job-1"] == tuple(slots(a=1, b=1))


def test_of_two_racks_a_job_takes_that_in_which_it_needs_fewer_hosts() -> None:
    usable = slots(a=1, b=1, c=2)
    placed = place([Want("job-1", 2, hosts=hosts(usable))], usable=usable, free=usable, domains=RACKS)
    assert placed["job-1"] == tuple(slots(c=2))


def test_a_job_that_is_spread_has_as_few_workers_in_one_place_as_can_be() -> None:
    usable = slots(a=4, b=4, c=4, d=4)
    want = Want("job-1", 4, hosts=hosts(usable), is_spread=True)
    placed = place([want], usable=usable, free=usable)["job-1"]
    assert hosts(placed) == frozenset("abcd")
    two = replace(want, workers=2)
    zones = place([two], usable=usable, free=usable, domains=RACKS)["job-1"]
    assert {RACKS[slot.host][0] for slot in zones} == {"x", "y"}
    held = (*slots(a=3), *slots(b=1))
    assert hosts(place([replace(two, held=held)], usable=usable, free=())["job-1"]) == frozenset("ab")


def moving(num: int, held: Sequence[SlotId], *, least: int = 1) -> Want:
    return Want("job-1", num, tuple(held), hosts=frozenset("abcd"), least_kept=least)


def test_workers_move_to_the_hosts_where_the_others_are() -> None:
    held = (*slots(a=3), *slots(b=1))
    placed = place([moving(4, held)], usable=TWO, free=[SlotId("a", 3)])
    assert placed["job-1"] == tuple(slots(a=4))


def test_all_workers_move_if_others_could_not_stay() -> None:
    usable, held = slots(a=2, b=2, c=4), tuple(slots(a=2, b=2))
    placed = place([moving(4, held, least=4)], usable=usable, free=slots(c=4))
    assert placed["job-1"] == tuple(slots(c=4))


def test_nothing_moves_below_the_minimum_or_for_nothing() -> None:
    held = (*slots(a=3), *slots(b=1))
    assert place([moving(4, held, least=4)], usable=TWO, free=[SlotId("a", 3)])["job-1"] == held
    apart = (*slots(a=2), *slots(b=2))
    assert place([moving(4, apart)], usable=(*TWO, *slots(c=3)), free=slots(c=3))["job-1"] == apart


def test_a_job_does_not_move_into_slots_that_another_one_takes() -> None:
    held = (*slots(a=3), *slots(b=1))
    wants = [moving(4, held), Want("job-2", 1, hosts=frozenset("a"))]
    placed = place(wants, usable=TWO, free=[SlotId("a", 3)])
    assert placed == {"job-1": held, "job-2": (SlotId("a", 3),)}


def test_a_job_does_not_move_to_hosts_that_it_may_not_use() -> None:
    held = tuple(slots(a=2, b=2))
    want = replace(moving(4, held), hosts=frozenset("ab"))
    assert place([want], usable=slots(a=2, b=2, c=4), free=slots(c=4))["job-1"] == held


@dataclass(frozen=True)
class Given:
    """Jobs and slots to be placed."""

    wants: list[Want]
    usable: list[SlotId]
    free: list[SlotId]
    domains: Mapping[str, Domain]

    def place(self) -> dict[str, tuple[SlotId, ...]]:
        return place(self.wants, usable=self.usable, free=self.free, domains=self.domains)

    def after(self, placed: Mapping[str, tuple[SlotId, ...]]) -> "Given":
        """What is given once all have what they should have."""
        wants = [replace(want, held=placed[want.job], workers=len(placed[want.job])) for want in self.wants]
        held = {slot for slots in placed.values() for slot in slots}
        return replace(self, wants=wants, free=[slot for slot in self.usable if slot not in held])

    def scatter(self) -> int:
        """Over how many zones, racks and hosts the jobs are scattered, all together."""
        return sum(sum(num_places((slot.host for slot in want.held), self.domains)) for want in self.wants)


@st.composite
def pools(draw: st.DrawFn) -> Given:
    every = [SlotId(host, n) for host in "abcd"[: draw(st.integers(1, 4))] for n in range(draw(st.integers(1, 4)))]
    owners = [draw(st.integers(0, 3)) for _ in every]
    usable = [slot for slot in every if draw(st.booleans()) or draw(st.booleans())]
    wants = []
    for number in (1, 2, 3):
        held = draw(st.permutations([slot for slot, owner in zip(every, owners, strict=True) if owner == number]))
        hosts = draw(st.frozensets(st.sampled_from("abcd")))
        is_spread = draw(st.booleans())
        least = None if is_spread else draw(st.none() | st.integers(0, 4))
        wants.append(Want(f"job-{number}", draw(st.integers(0, 8)), tuple(held), frozenset(), hosts, is_spread, least))
    free = [slot for slot, owner in zip(every, owners, strict=True) if owner == 0 and slot in usable]
    return Given(wants, usable, free, draw(st.sampled_from([{}, RACKS])))


@given(pools())
def test_the_promises_of_a_placement(pool: Given) -> None:
    placed = pool.place()
    everything = [slot for chosen in placed.values() for slot in chosen]
    assert len(set(everything)) == len(everything), "no slot twice"
    assert set(everything) <= set(pool.usable)
    given_up = {slot for want in pool.wants if want.least_kept is not None for slot in want.held} - set(everything)
    for want in pool.wants:
        chosen = placed[want.job]
        kept = [slot for slot in want.held if slot in pool.usable]
        assert len(chosen) <= want.workers
        stay = set(chosen) & set(kept)
        must_stay = min(len(kept), want.workers)
        if want.least_kept is None:
            assert len(stay) == must_stay, "nothing moves without need"
        else:
            assert not stay or len(stay) >= min(want.least_kept, must_stay), "no move below the minimum"
        assert {slot.host for slot in set(chosen) - set(kept)} <= want.hosts
        left = {slot for slot in set(pool.usable) - set(everything) - given_up if slot.host in want.hosts}
        assert len(chosen) == want.workers or not left or want.least_kept is not None, "nothing that fits is left over"


@given(pools(), st.randoms())
def test_the_order_of_jobs_and_slots_does_not_matter(pool: Given, random: Random) -> None:
    before = pool.place()
    for sequence in (pool.wants, pool.usable, pool.free):
        random.shuffle(sequence)
    assert pool.place() == before


@given(pools())
def test_jobs_that_have_what_they_should_have_stay_and_moves_end(pool: Given) -> None:
    """Placed again, jobs move only to fewer places, so there is an end to it."""
    pool = pool.after({want.job: tuple(slot for slot in want.held if slot in pool.usable) for want in pool.wants})
    while (again := pool.place()) != {want.job: want.held for want in pool.wants}:
        moved = [want for want in pool.wants if set(again[want.job]) != set(want.held)]
        assert all(want.least_kept is not None for want in moved), "only jobs that may move do"
        after = pool.after(again)
        assert not moved or after.scatter() < pool.scatter()
        pool = after


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8), min_size=1), st.integers(1, 20))
def test_a_new_job_is_on_as_few_hosts_as_can_be(rooms: dict[str, int], num: int) -> None:
    free = slots(**rooms)
    placed = place([Want("job-1", num, hosts=hosts(free))], usable=free, free=free)["job-1"]
    largest = list(accumulate(sorted(rooms.values(), reverse=True)))
    assert len(placed) == min(num, len(free))
    assert len(hosts(placed)) == 1 + sum(total < len(placed) for total in largest)
    in_order = [host for host, _ in groupby(slot.host for slot in placed)]
    assert len(set(in_order)) == len(in_order), "workers of one host are neighbours"


@given(
    st.lists(st.sampled_from("abcdefgh"), max_size=12),
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.sampled_from(("", "z1", "z2")), st.sampled_from("rs"))),
)
def test_workers_of_one_host_rack_and_zone_are_neighbors_and_the_first_stays_the_first(
    workers: list[str], domains: dict[str, Domain]
) -> None:
    order = neighbors(workers, domains)
    assert sorted(order) == list(range(len(workers)))
    assert order[:1] == [0][: len(workers)]
    for level in (1, 2):
        places = [domains.get(workers[number], ())[:level] for number in order]
        assert len(list(groupby(places))) == len({*places}), "each place is one run of workers"
    hosts = [workers[number] for number in order]
    assert len(list(groupby(hosts))) == len({*hosts})
    for host in {*workers}:
        own = [number for number in order if workers[number] == host]
        assert own == sorted(own), "those of a host keep their order"


def test_ranks_of_a_job_that_has_not_changed_stay() -> None:
    order = neighbors("abcab", {})
    assert order == [0, 3, 1, 4, 2]
    again = neighbors(["abcab"[number] for number in order], {})
    assert again == list(range(5))
