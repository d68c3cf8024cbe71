"""Where slots share accelerators: no two workers on one while another is idle."""

from collections import Counter
from collections.abc import Collection, Sequence

import hypothesis.strategies as st
from hypothesis import given

from resile_scheduler.core.slots.devices import SharedDevices
from resile_scheduler.core.slots.placement import Want, place
from resile_scheduler.core.state.pool import Host
from resile_scheduler.core.state.slot_sets import SlotId, by_host
from resile_shared.messages.hosts import HostRecord, HostState, Slot
from resile_shared.messages.message import at
from resile_shared.version import VERSION


def host(*devices: str) -> Host:
    record = HostRecord(
        host="a",
        incarnation=1,
        state=HostState.UP,
        address="h",
        slots=tuple(Slot(index=index, device=device) for index, device in enumerate(devices)),
        device_class="gpu",
        version=VERSION,
        since=at(0.0),
    )
    return Host(record, is_heard=True)


def slot(number: int) -> SlotId:
    return SlotId("a", number)


def order(
    devices: Sequence[str], *, free: Collection[int], held: Collection[int] = (), leaving: Collection[int] = ()
) -> list[int]:
    shared = SharedDevices({"a": host(*devices)}, held={*map(slot, held)}, leaving={*map(slot, leaving)})
    return [each.number for each in shared.in_order("a", [*map(slot, free)])]


TWICE = ("cuda:0", "cuda:1", "cuda:0", "cuda:1")


def test_a_device_that_nobody_has_comes_first() -> None:
    assert order(TWICE, free=[1, 2, 3], held=[0]) == [1, 2, 3]
    assert order(TWICE, free=[0, 2, 3], held=[1]) == [0, 2, 3]
    assert order(TWICE, free=[0, 1, 2, 3]) == [0, 1, 2, 3]
    assert order(("cuda:0", "cuda:0", "cuda:1", "cuda:1"), free=[0, 1, 2, 3]) == [0, 2, 1, 3]


def test_a_device_whose_worker_leaves_comes_before_one_whose_worker_stays() -> None:
    assert order(TWICE, free=[2, 3], held=[0, 1], leaving=[1]) == [3, 2]
    assert order((*TWICE, "cuda:2"), free=[2, 3, 4], held=[0, 1], leaving=[1]) == [4, 3, 2]


def test_slots_that_share_nothing_are_in_the_order_of_their_numbers() -> None:
    assert order(("cpu",) * 4, free=[3, 1, 0], held=[2]) == [0, 1, 3]
    assert order(("cuda:0", "cuda:1"), free=[1, 0]) == [0, 1]


def test_a_job_gives_up_the_device_that_it_shares() -> None:
    hosts = {"a": host(*TWICE)}
    held = [slot(0), slot(2), slot(1)]
    want = Want("job-1", 2, tuple(held), hosts=frozenset("a"))

    def kept(*others: int) -> list[int]:
        devices = SharedDevices(hosts, held={*held, *map(slot, others)})
        placed = place([want], free={}, released={}, domains={}, devices=devices)
        return [each.number for each in placed["job-1"]]

    assert kept() == [0, 1]
    one = Want("job-1", 1, (slot(0), slot(1)), hosts=frozenset("a"))
    devices = SharedDevices(hosts, held={slot(0), slot(1), slot(2)})
    assert place([one], free={}, released={}, domains={}, devices=devices)["job-1"] == (slot(1),)


@given(
    st.lists(st.sampled_from(("cuda:0", "cuda:1", "cuda:2")), min_size=1, max_size=9),
    st.lists(st.sampled_from(("free", "held", "leaving")), min_size=9, max_size=9),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_no_device_gets_a_worker_while_one_with_a_free_slot_has_fewer(
    of: list[str], states: list[str], sizes: tuple[int, int]
) -> None:
    slots = {state: [slot(n) for n, each in enumerate(states[: len(of)]) if each == state] for state in states}
    free = slots.get("free", [])
    devices = SharedDevices(
        {"a": host(*of)}, held={*slots.get("held", ()), *slots.get("leaving", ())}, leaving={*slots.get("leaving", ())}
    )
    wants = [Want(f"job-{number}", size, hosts=frozenset("a")) for number, size in enumerate(sizes)]
    offered = {"a": devices.in_order("a", free)} if free else {}
    placed = place(wants, free=offered, released=by_host(slots.get("leaving", ())), domains={}, devices=devices)
    taken = {each for slots in placed.values() for each in slots}.intersection(free)
    assert len(taken) == min(sum(sizes), len(free))
    load = Counter(of[each.number] for each in {*slots.get("held", ()), *taken})
    left = {of[each.number] for each in free if each not in taken}
    if len({*of}) < len(of):
        assert all(load[of[each.number]] <= load[other] + 1 for each in taken for other in left)
