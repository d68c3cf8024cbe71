"""On which slots: nothing twice, nothing moved without need, few hosts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from resile_scheduler.core import placement
from resile_scheduler.core.placement import SlotId, Want, by_host


def slots(**hosts: int) -> list[SlotId]:
    return [SlotId(host, number) for host, num in hosts.items() for number in range(num)]


def names(placed: tuple[SlotId, ...]) -> list[str]:
    return [slot.name for slot in placed]


def hosts(slots: Iterable[SlotId]) -> frozenset[str]:
    return frozenset(slot.host for slot in slots)


def place(wants: Sequence[Want], *, usable: Iterable[SlotId], free: Iterable[SlotId]) -> dict[str, tuple[SlotId, ...]]:
    """Place jobs that may keep what they hold of ``usable``; what is neither held nor free is released."""
    usable, free = set(usable), set(free)
    wants = [replace(want, held=tuple(slot for slot in want.held if slot in usable)) for want in wants]
    held = {slot for want in wants for slot in want.held}
    return placement.place(wants, free=by_host(free), released=by_host(usable - free - held))


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


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Want], list[SlotId], list[SlotId]]:
    every = [SlotId(host, n) for host in "abcd"[: draw(st.integers(1, 4))] for n in range(draw(st.integers(1, 4)))]
    owners = [draw(st.integers(0, 3)) for _ in every]
    usable = [slot for slot in every if draw(st.booleans()) or draw(st.booleans())]
    wants = []
    for number in (1, 2, 3):
        held = draw(st.permutations([slot for slot, owner in zip(every, owners, strict=True) if owner == number]))
        hosts = draw(st.frozensets(st.sampled_from("abcd")))
        wants.append(Want(f"job-{number}", draw(st.integers(0, 8)), tuple(held), hosts=hosts))
    return wants, usable, [slot for slot, owner in zip(every, owners, strict=True) if owner == 0 and slot in usable]


@given(pools())
def test_the_promises_of_a_placement(pool: tuple[list[Want], list[SlotId], list[SlotId]]) -> None:
    wants, usable, free = pool
    placed = place(wants, usable=usable, free=free)
    everything = [slot for chosen in placed.values() for slot in chosen]
    assert len(set(everything)) == len(everything), "no slot twice"
    assert set(everything) <= set(usable)
    for want in wants:
        chosen = placed[want.job]
        kept = [slot for slot in want.held if slot in usable]
        assert len(chosen) <= want.workers
        assert len(set(chosen) & set(kept)) == min(len(kept), want.workers), "nothing moves without need"
        assert {slot.host for slot in set(chosen) - set(kept)} <= want.hosts
        left = {slot for slot in set(usable) - set(everything) if slot.host in want.hosts}
        assert len(chosen) == want.workers or not left, "nothing that fits is left over"
