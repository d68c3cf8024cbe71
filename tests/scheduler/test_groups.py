"""Jobs that ask for labels: in simulated pools they get their shares, and no slot is idle that one of them can use."""

from collections import Counter
from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resile_scheduler.core.slots.relocation import Mover, find_room
from resile_scheduler.core.state.slot_sets import SlotId, by_host
from resile_scheduler.policies.table import POLICIES
from resile_scheduler.simulation.simulated_pool import SimulatedPool
from resile_scheduler.simulation.training import Sharded
from resile_scheduler.simulation.workload import Submission
from resile_shared.messages.commands import PoolPolicy
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobSpec
from resile_shared.policies import PolicyName

from .checks import Checker
from .test_simulator import shapes, spec

FOREVER = Sharded(10_000_000)


def pool(
    *hosts: str, policy: PolicyName = PolicyName.FAIRSHARE, preemption: bool = True, slots: int = 4
) -> SimulatedPool:
    """Hosts, each with its name as its label."""
    sim = SimulatedPool(policies=POLICIES, chosen=PoolPolicy(policy=policy, preemption=preemption))
    sim.restart_scheduler()
    for name in hosts:
        sim.add_host(name, slots, labels={"gpu": name})
    return sim


def submit(sim: SimulatedPool, *specs: JobSpec) -> None:
    first = len(sim.records) + 1
    sim.submit([Submission(sim.now - sim.start, f"job-{first + n}", each, FOREVER) for n, each in enumerate(specs)])


def held(sim: SimulatedPool) -> dict[str, dict[str, int]]:
    """How many workers each job has on which hosts."""
    found: dict[str, Counter[str]] = {job: Counter() for job in sim.records}
    for slot, job in sim.scheduler.holders().items():
        found[job][slot.partition("/")[0]] += 1
    return {job: dict(numbers) for job, numbers in found.items()}


def pass_time(sim: SimulatedPool, seconds: float = 200.0) -> None:
    sim.run(until=sim.now - sim.start + seconds, watch=Checker(sim).check)


@pytest.mark.parametrize("preemption", [True, False])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_jobs_that_do_not_fit_on_their_hosts_take_no_slots_from_others(name: PolicyName, preemption: bool) -> None:
    sim = pool("a", "b", policy=name, preemption=preemption)
    submit(sim, spec(least=4, group="gpu=a"), spec(least=4, group="gpu=a"), spec(most=4))
    pass_time(sim)
    assert sorted(map(str, held(sim).values())) == sorted(map(str, [{"a": 4}, {}, {"b": 4}]))
    assert "waiting for 4 slots" in " ".join(sim.scheduler.explain().values())


def test_a_job_that_may_be_elsewhere_makes_room() -> None:
    sim = pool("a", "b")
    submit(sim, spec(most=4))
    pass_time(sim, 100.0)
    assert held(sim)["job-1"] == {"a": 4}
    submit(sim, spec(least=2, most=4, group="gpu=a"))
    pass_time(sim)
    assert held(sim) == {"job-1": {"b": 4}, "job-2": {"a": 4}}
    assert shapes(sim, "job-1")[-1] == (4, "it makes room for job-2, which may not use other hosts")


def test_jobs_exchange_no_slots_that_they_may_not_use() -> None:
    """The third one could be on one host if one of the others were on the other."""
    sim = pool("a", "b")
    submit(sim, spec(most=2, group="gpu=a"), spec(most=2, group="gpu=b"), spec(most=4))
    pass_time(sim, 300.0)
    assert held(sim) == {"job-1": {"a": 2}, "job-2": {"b": 2}, "job-3": {"a": 2, "b": 2}}


def test_a_gang_cannot_make_room_so_its_slots_are_no_share_of_others() -> None:
    sim = pool("a", "b")
    submit(sim, spec(least=4, most=4, gang=True))
    pass_time(sim, 50.0)
    submit(sim, spec(least=4, group="gpu=a"), spec())
    pass_time(sim)
    assert held(sim) == {"job-1": {"a": 4}, "job-2": {}, "job-3": {"b": 4}}


def test_a_job_that_would_fall_below_its_minimum_stays_and_others_get_the_slots() -> None:
    sim = pool("a", "b", slots=2)
    submit(sim, spec(least=3, most=3))
    pass_time(sim, 100.0)
    on = held(sim)["job-1"]
    full, other = ("a", "b") if on["a"] == 2 else ("b", "a")
    submit(sim, spec(most=1, group=f"gpu={full}"), spec(most=1))
    pass_time(sim)
    assert held(sim) == {"job-1": on, "job-2": {}, "job-3": {other: 1}}


def test_a_job_without_enough_workers_still_has_its_share() -> None:
    """Its host is lost and returns: the slots are not given away, as if it needed none."""
    sim = pool("a", "b")
    sim.add_host("a2", 2, labels={"gpu": "a"})
    submit(sim, spec(least=3, most=6, group="gpu=a"), spec(group="gpu=a"), spec())
    pass_time(sim, 100.0)
    sim.change_host("a2", HostState.LOST)
    pass_time(sim, 5.0)
    sim.add_host("a2", 2, labels={"gpu": "a"}, incarnation=2)
    pass_time(sim)
    assert sum(held(sim)["job-1"].values()) >= 3
    assert held(sim)["job-3"] == {"b": 4}


def test_a_job_keeps_slots_of_a_host_that_has_lost_the_label() -> None:
    sim = pool("a", "b")
    submit(sim, spec(least=4, most=4, group="gpu=a"), spec())
    pass_time(sim, 100.0)
    sim.handle(sim.hosts["a"].model_copy(update={"labels": {"gpu": "c"}}))
    submit(sim, spec(group="gpu=c"))
    pass_time(sim)
    assert held(sim) == {"job-1": {"a": 4}, "job-2": {"b": 4}, "job-3": {}}


def test_a_chain_of_jobs_makes_room() -> None:
    slots = [SlotId(host, number) for host in "abc" for number in range(2)]
    on_a = Mover(tuple(slots[:2]), 1, frozenset("ab"))
    on_b = Mover(tuple(slots[2:4]), 1, frozenset("bc"))
    free = by_host(slots[4:])
    lacking = frozenset("a")
    assert find_room(lacking, 1, {"x": on_a}, free=free, domains={}) == {}
    assert find_room(lacking, 1, {"x": on_a, "y": on_b}, free=free, domains={}) == {"y": (slots[2], slots[4])}
    whole = {"x": on_a._replace(least=2, hosts=frozenset("ac"))}
    assert find_room(lacking, 1, whole, free=free, domains={}) == {"x": tuple(slots[4:])}, "all at once"
    assert find_room(lacking, 1, whole, free={"c": slots[4:5]}, domains={}) == {}, "it stays above its minimum"


@st.composite
def submissions(draw: st.DrawFn) -> list[tuple[float, JobSpec]]:
    found = []
    for _ in range(draw(st.integers(1, 6))):
        most = draw(st.integers(1, 8))
        kind = draw(st.sampled_from(["elastic", "elastic", "spread", "sized", "gang"]))
        least = most if kind == "gang" else draw(st.integers(1, most))
        fields: dict[str, object] = {"group": draw(st.sampled_from(["", "", "gpu=a", "gpu=b", "zone=x"]))}
        fields |= {"placement": "spread"} if kind == "spread" else {}
        fields |= {"sizes": tuple(range(least, most + 1, 2))} if kind == "sized" else {}
        fields |= {"gang": True, "restartable": draw(st.booleans())} if kind == "gang" else {}
        found.append((draw(st.sampled_from([0.0, 0.0, 30.0, 300.0])), spec(least=least, most=most, **fields)))
    return sorted(found, key=lambda item: item[0])


def trained(
    jobs: Iterable[tuple[float, JobSpec]], policy: PolicyName, preemption: bool
) -> tuple[SimulatedPool, list[tuple[str, tuple[str, ...]]]]:
    sim = pool(policy=policy, preemption=preemption)
    for name, labels in (("a", {"gpu": "a", "zone": "x"}), ("b", {"gpu": "b", "zone": "x"}), ("c", {})):
        sim.add_host(name, 3, labels=labels)
    sim.submit([Submission(at, f"job-{n}", each, FOREVER) for n, (at, each) in enumerate(jobs, 1)])
    for seconds in range(0, 550, 20):  # until then no job is due
        sim.later(seconds, sim.send_heartbeats)
    sim.run(until=550.0, watch=Checker(sim).check)
    return sim, [(each.job, tuple(p.slot_name for p in each.placements)) for each in sim.allocations]


@settings(max_examples=40)
@given(
    jobs=submissions(),
    policy=st.sampled_from([PolicyName.FAIRSHARE, PolicyName.FIFO, PolicyName.PRIORITY]),
    preemption=st.booleans(),
)
def test_no_slot_stays_idle_that_a_waiting_job_can_use(
    jobs: list[tuple[float, JobSpec]], policy: PolicyName, preemption: bool
) -> None:
    sim, allocations = trained(jobs, policy, preemption)
    assert trained(jobs, policy, preemption)[1] == allocations, "the same events, the same decisions"
    assert len(allocations) < 100, "decisions come to an end"
    free = Checker(sim).free_slots()
    for job, record in sim.records.items():
        group = record.spec.group
        hosts = {"": "abc", "gpu=a": "a", "gpu=b": "b", "zone=x": "ab"}[group]
        usable = sum(slot[0] in hosts for slot in free)
        if not held(sim)[job]:
            assert usable < record.spec.min_workers, (job, sim.scheduler.explain())
