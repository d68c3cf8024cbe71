"""What is kept of jobs from one decision to the next leads to what looking at everything again would."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

import hypothesis.strategies as st
from hypothesis import given

from resile_scheduler.core.slots.host_groups import HostGroups
from resile_scheduler.core.slots.job_view import JobView
from resile_scheduler.core.slots.placement import place
from resile_scheduler.core.slots.sharing import Sharing
from resile_scheduler.core.state.job import Job
from resile_scheduler.core.state.pool import Host, Pool
from resile_scheduler.core.state.slot_sets import SlotId, by_host, merged, without
from resile_scheduler.policies.demand import Demand, Target
from resile_scheduler.policies.ranked import fairshare
from resile_shared.messages.hosts import HostRecord, HostState, Slot
from resile_shared.messages.jobs import JobRecord, JobState
from resile_shared.messages.message import at
from resile_shared.version import VERSION

from .test_core import spec

SLOTS = st.sets(st.builds(SlotId, st.sampled_from("abc"), st.integers(0, 3)))


def view(number: int, priority: int = 5000) -> JobView:
    record = JobRecord(
        job=f"job-{number}",
        spec=spec(max_workers=16),
        state=JobState.QUEUED,
        priority=priority,
        submitted=at(0.0),
        applied_commands=(f"submit {number}",),
    )
    return JobView(Job(record, number=number), now=0.0)


@given(
    changes=st.lists(st.tuples(st.integers(0, 3), st.sampled_from((1, 5000, 10000)), st.booleans()), max_size=8),
    num_slots=st.lists(st.integers(0, 40), min_size=9, max_size=9),
)
def test_a_policy_is_asked_again_when_a_demand_or_the_slots_differ(
    changes: list[tuple[int, int, bool]], num_slots: list[int]
) -> None:
    views = [view(number) for number in range(4)]
    asked: list[int] = []

    def policy(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        asked.append(num_slots)
        return fairshare(demands, num_slots)

    sharing, before = Sharing(views), None
    for (number, priority, is_refreshed), slots in zip([(0, 5000, True), *changes], num_slots, strict=False):
        changed = views[number]
        changed.demand = replace(changed.demand, priority=priority, most=16)
        if is_refreshed:
            for each in views:
                sharing.refresh(each)
            sharing.refresh(view(9))
            now = (slots, [each.demand for each in views])
            targets, is_new = sharing.targets(policy, slots)
            assert targets == fairshare(now[1], slots)
            assert is_new is (now != before)
            before = now
    assert sharing.targets(policy, -1)[1]
    assert sharing.targets(fairshare, -1)[1], "another policy"


def test_jobs_keep_their_order_whoever_is_looked_at_first() -> None:
    views = [view(number) for number in range(4)]
    assert Sharing(views).among({"job-3": None, "job-8": None, "job-1": None}) == [views[1], views[3]]


@given(slots=SLOTS, more=SLOTS)
def test_slots_by_host_are_merged_and_taken_away(slots: set[SlotId], more: set[SlotId]) -> None:
    assert merged(by_host(slots), by_host(more)) == by_host(slots | more)
    assert without(by_host(slots), more) == by_host(slots - more)


class Moves:
    """A job on ``usable``, in a pool of ``hosts`` (slots and rack), on whose other slots nobody is if they are free."""

    def __init__(self, hosts: Mapping[str, tuple[int, str]], usable: Iterable[SlotId], *, group: str = "") -> None:
        pool = Pool()
        for name, (num, rack) in hosts.items():
            pool.put_host(Host(_record(name, num, rack), is_heard=True))
        self._groups, self._view = HostGroups(pool), view(1)
        self._groups.refresh()
        self._view.job.update(spec=spec(max_workers=16, group=group))
        self._view.device_class = "cpu"
        self._view.usable = tuple(usable)
        self._view.on_host = Counter(slot.host for slot in self._view.usable)
        self._view.limit_to(self._groups)

    def are_looked_for(self) -> bool:
        """Whether it is looked at when slots are free."""
        return self._view._may_be_narrower

    def are_found(self, free: Iterable[SlotId]) -> bool:
        """Whether it moves if it is looked at."""
        want = replace(self._view.want(len(self._view.usable), self._groups, now=0.0), least_kept=1)
        placed = place([want], free=by_host(free), released={}, domains=self._groups.domains)
        return placed["job-1"] != self._view.usable


def _record(name: str, num: int, rack: str) -> HostRecord:
    return HostRecord(
        host=name,
        incarnation=1,
        state=HostState.UP,
        address="10.0.0.1",
        slots=tuple(Slot(index=index) for index in range(num)),
        device_class="cpu",
        version=VERSION,
        labels={"kind": name, **({"rack": rack} if rack else {})},
        since=at(0.0),
    )


def test_a_job_that_may_be_in_fewer_places_is_looked_at() -> None:
    a0, a1, a2, b0, b1, c0 = (SlotId(*slot) for slot in [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0)])
    one_host = Moves({"a": (2, ""), "b": (1, "")}, [a0, b0])
    assert one_host.are_looked_for()
    assert one_host.are_found([a1])
    one_rack = Moves({"a": (1, "1"), "b": (1, "2"), "c": (1, "2")}, [a0, b0])
    assert one_rack.are_looked_for()
    assert one_rack.are_found([c0])
    from_outside = Moves({"a": (3, ""), "b": (2, ""), "c": (1, "")}, [a0, a1, a2, b0, c0], group="kind=b")
    assert from_outside.are_looked_for()
    assert from_outside.are_found([b1])
    assert not Moves({"a": (2, ""), "b": (1, "")}, [a0, a1, b0]).are_looked_for()


@given(
    hosts=st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 4), st.sampled_from("12")), min_size=2),
    has_racks=st.booleans(),
    is_grouped=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_a_job_that_is_not_looked_at_could_not_be_in_fewer_places(
    hosts: dict[str, tuple[int, str]], has_racks: bool, is_grouped: bool, seed: int
) -> None:
    rng = Random(seed)
    hosts = hosts if has_racks else {name: (num, "") for name, (num, _) in hosts.items()}
    everything = [SlotId(name, index) for name, (num, _) in hosts.items() for index in range(num)]
    usable = rng.sample(everything, rng.randint(1, len(everything)))
    moves = Moves(hosts, usable, group=f"kind={rng.choice(sorted(hosts))}" if is_grouped else "")
    free = [slot for slot in everything if slot not in usable and rng.random() < 0.8]
    assert moves.are_looked_for() or not moves.are_found(free)
