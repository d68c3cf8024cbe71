"""Exchanges of slots: a job is on one host fewer, nobody is on more, and nothing is held twice."""

from collections.abc import Mapping

import hypothesis.strategies as st
from hypothesis import given

from resile_scheduler.core.slots.relocation import Holder, exchange
from resile_scheduler.core.state.slot_sets import SlotId, by_host
from resile_scheduler.core.state.topology import num_places


def slots(*names: str) -> tuple[SlotId, ...]:
    return tuple(SlotId(name[0], int(name[1])) for name in names)


def exchanged(
    holders: Mapping[str, Holder],
    *,
    free: tuple[SlotId, ...] = (),
    refused: frozenset[tuple[str, str]] = frozenset(),
    domains: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, tuple[SlotId, ...]]:
    return exchange(
        "wide",
        holders,
        free=by_host(free),
        may_use=lambda job, host: (job, host) not in refused,
        domains=domains or {},
    )


WIDE = Holder(slots("a0", "a1", "b0", "b1"), 1)
OTHER = Holder(slots("a2", "a3"), 2)


def test_two_jobs_that_share_two_hosts_get_one_each() -> None:
    other = Holder(slots("b2", "b3", "a2", "a3"), 1)
    assert exchanged({"wide": WIDE, "other": other}) == {
        "wide": slots("b0", "b1", "b2", "b3"),
        "other": slots("a0", "a1", "a2", "a3"),
    }


def test_a_small_job_makes_room_and_free_slots_are_used() -> None:
    small = Holder(slots("a2"), 1)
    found = exchanged({"wide": WIDE, "small": small}, free=slots("a3"))
    assert found == {"wide": slots("a0", "a1", "a3", "a2"), "small": slots("b0")}


def test_nobody_goes_below_its_minimum_or_where_it_may_not_be_or_to_more_hosts() -> None:
    assert exchanged({"wide": WIDE, "other": OTHER})
    assert not exchanged({"wide": WIDE._replace(least=3), "other": OTHER})
    assert not exchanged({"wide": WIDE, "other": OTHER}, refused=frozenset({("other", "b")}))
    assert not exchanged({"wide": WIDE, "other": Holder(slots("a2", "c0"), 1)})
    assert not exchanged({"wide": WIDE, "other": Holder(slots("a1", "a2", "a3"), 3)})
    assert not exchanged({"wide": WIDE}, free=slots("a2", "a3")), "a move, which needs nobody"


@st.composite
def pools(draw: st.DrawFn) -> tuple[dict[str, Holder], tuple[SlotId, ...], Mapping[str, tuple[str, ...]]]:
    every = [SlotId(host, number) for host in "abc" for number in range(4)]
    owners = {slot: draw(st.sampled_from(["wide", "wide", "x", "y", "z", ""])) for slot in every}
    holders = {}
    for name in ("wide", "x", "y", "z"):
        held = tuple(slot for slot in every if owners[slot] == name)
        if held or name == "wide":
            holders[name] = Holder(tuple(draw(st.permutations(held))), draw(st.integers(1, 3)))
    racks = draw(st.sampled_from([{}, {"a": ("", "1"), "b": ("", "1"), "c": ("", "2")}]))
    return holders, tuple(slot for slot in every if not owners[slot]), racks


@given(pools())
def test_the_promises_of_an_exchange(
    pool: tuple[dict[str, Holder], tuple[SlotId, ...], Mapping[str, tuple[str, ...]]],
) -> None:
    holders, free, racks = pool
    found = exchanged(holders, free=free, domains=racks)
    if not found:
        return
    after = {name: found.get(name, holder.slots) for name, holder in holders.items()}
    held = [slot for of_job in after.values() for slot in of_job]
    assert len(held) == len(set(held)), "no slot twice"
    assert set(held) <= {*free, *(slot for holder in holders.values() for slot in holder.slots)}
    for name, holder in holders.items():
        before, now = (num_places((slot.host for slot in of), racks) for of in (holder.slots, after[name]))
        assert len(after[name]) == len(holder.slots)
        assert all(new <= old for new, old in zip(now, before, strict=True))
        kept = set(after[name]) & set(holder.slots)
        assert not kept or len(kept) >= min(holder.least, len(holder.slots))
        if name == "wide":
            assert now[-1] == before[-1] - 1
