"""Accusations: which workers are evicted though no agent reported their end."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.events import Command, ProbeExpired, ProbeHost, StateRestored, StopWorkers
from resile_scheduler.core.state.suspicions import SuspicionTracker, largest_connected_set
from resile_shared.messages.hosts import Address, Heartbeat, HostState, WorkerReport
from resile_shared.messages.jobs import JobState
from resile_shared.messages.reports import Evidence, PeerSuspected

from .test_core import Bench, gone, result, worker
from .test_recovery import member, named, running, switched


def two_hosts(detection_seconds: float = 3.0) -> Bench:
    """A job with two members on each of two hosts."""
    bench = Bench(2, 2, detection_seconds=detection_seconds)
    bench.submit()
    bench.beat(worker(0, 0), worker(1, 1))
    bench.beat(worker(2, 0), worker(3, 1), host="host-2")
    bench.switch()
    return bench


def accuse(bench: Bench, accuser: int, suspect: int, evidence: Evidence = "broken link") -> list[Command]:
    lost = PeerSuspected(suspect=suspect, evidence=evidence, reason="the connection broke")
    return bench.report(lost, worker=accuser, generation=bench.records["job-1"].generation)


def test_the_agent_of_a_suspect_is_asked_at_once() -> None:
    bench = two_hosts()
    assert accuse(bench, 0, 2) == [ProbeHost("host-2", 1, bench.beats, 0.05)]
    assert accuse(bench, 1, 3) == [], "one question to a host is enough"


def test_a_host_that_does_not_answer_is_evicted_before_it_is_lost() -> None:
    bench = two_hosts()
    [challenge] = accuse(bench, 0, 2)
    assert isinstance(challenge, ProbeHost)
    bench.tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))
    assert bench.newest().is_recovery
    assert named(bench) == [0, 1]
    assert bench.newest().reason == "host-2 does not answer"
    assert (loss := bench.newest().loss)
    assert loss.host == "host-2"
    bench.switch(iteration=7)
    assert named(bench) == [0, 1]
    assert len(bench.scheduler.holders()) == 4, "its slots stay held"
    bench.host("host-2", 2, state=HostState.LOST)
    assert len(bench.scheduler.holders()) == 2
    assert bench.records["job-1"].state is JobState.RUNNING


def test_a_host_that_did_not_answer_is_used_as_soon_as_it_is_back_with_a_new_incarnation() -> None:
    bench = two_hosts()
    [challenge] = accuse(bench, 0, 2)
    assert isinstance(challenge, ProbeHost)
    bench.tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))
    bench.switch(iteration=7)
    bench.host("host-2", 2, incarnation=2)
    assert {placement.host for placement in bench.newest().placements} == {"host-1", "host-2"}


def test_workers_that_were_evicted_are_stopped_when_their_host_is_back() -> None:
    bench = two_hosts()
    [challenge] = accuse(bench, 0, 2)
    assert isinstance(challenge, ProbeHost)
    bench.tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))
    commands = bench.beat(worker(2, 0, state="member"), worker(3, 1, state="member"), host="host-2")
    assert commands == [StopWorkers("job-1", "host-2", 1, (2, 3))]


def test_the_accusation_of_one_peer_against_a_live_worker_is_not_enough() -> None:
    bench = two_hosts()
    [challenge] = accuse(bench, 0, 2)
    assert isinstance(challenge, ProbeHost)
    before = bench.newest()
    bench.beat(worker(2, 0, state="member"), worker(3, 1, state="member"), host="host-2")
    bench.tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))
    assert bench.newest() == before


def test_an_answer_that_lists_the_suspect_as_gone_is_enough() -> None:
    bench = two_hosts()
    accuse(bench, 0, 2)
    bench.beat(gone(2, 0, kind="killed"), worker(3, 1, state="member"), host="host-2")
    assert named(bench) == [0, 1, 3]


def test_an_accusation_that_lasts_evicts_the_suspect() -> None:
    bench = two_hosts()
    for _ in range(4):
        accuse(bench, 0, 2)
        accuse(bench, 1, 2)
        bench.beat(worker(2, 0, state="member"), worker(3, 1, state="member"), host="host-2")
        bench.now += 1.0
    assert named(bench) == [0, 1, 3]
    assert bench.newest().reason == "worker 2 on host-2/0 did not take part, according to its peers"


def test_of_two_that_accuse_each_other_the_lower_id_goes_on() -> None:
    bench = two_hosts()
    [challenge] = accuse(bench, 3, 1)
    assert isinstance(challenge, ProbeHost)
    accuse(bench, 1, 3)
    bench.beat(member(0), member(1))
    bench.beat(worker(2, 0, state="member"), worker(3, 1, state="member"), host="host-2")
    bench.tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))
    assert named(bench) == [0, 1, 2]


def test_a_mutual_accusation_is_answered_though_others_are_not_mutual() -> None:
    bench = two_hosts()
    [challenge, *_] = [c for pair in ((3, 1), (1, 3), (0, 2)) for c in accuse(bench, *pair)]
    answered(bench, challenge)
    assert named(bench) == [0, 1]


def answered(bench: Bench, challenge: Command) -> None:
    """Both hosts answer that all their workers are alive."""
    assert isinstance(challenge, ProbeHost)
    bench.beat(member(0), member(1))
    bench.beat(worker(2, 0, state="member"), worker(3, 1, state="member"), host="host-2")
    bench.tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))


def test_a_frozen_worker_is_evicted_as_soon_as_its_agent_has_answered() -> None:
    bench = two_hosts()
    [challenge] = accuse(bench, 1, 0, "silence")
    accuse(bench, 2, 0, "silence")
    answered(bench, challenge)
    assert named(bench) == [1, 2, 3], "though the lowest id is the one that is frozen"
    bench.switch(iteration=7)
    bench.beat(gone(0, 0, kind="killed"), member(1))
    assert named(bench) == [1, 4, 2, 3], "another worker takes its place at once, beside the other one of its host"


def test_the_time_to_report_silence_grows_with_detection_seconds() -> None:
    for detection_seconds, moment in ((3.0, 0.2), (30.0, 2.0)):
        bench = two_hosts(detection_seconds)
        [challenge] = accuse(bench, 1, 0, "silence")
        assert isinstance(challenge, ProbeHost)
        assert challenge.seconds == pytest.approx(moment)


def test_a_worker_that_is_cut_off_from_all_others_is_evicted_and_its_host_avoided() -> None:
    bench = two_hosts()
    [challenge, *_] = [c for other in (1, 2, 3) for c in accuse(bench, 0, other, "silence")]
    for other in (1, 2, 3):
        accuse(bench, other, 0, "silence")
    answered(bench, challenge)
    assert named(bench) == [1, 2, 3]
    bench.switch(iteration=7)
    bench.beat(gone(0, 0, kind="killed"), member(1))
    assert named(bench) == [1, 2, 3], "no new worker is started on its host for now"


def test_hearsay_does_not_divide_a_job() -> None:
    bench = two_hosts()
    [challenge, *_] = [c for pair in ((0, 2), (0, 3), (2, 0), (3, 0)) for c in accuse(bench, *pair, "silence")]
    accuse(bench, 1, 2, "hearsay")
    accuse(bench, 3, 2, "hearsay")
    answered(bench, challenge)
    assert named(bench) == [1, 2, 3]


def test_a_divided_job_goes_on_with_the_larger_part() -> None:
    bench = Bench(1, 1, 1)
    bench.submit()
    for number in range(3):
        bench.beat(worker(number, 0), host=f"host-{number + 1}")
    bench.switch()
    [challenge, *_] = [c for pair in ((0, 1), (1, 0), (0, 2), (2, 0)) for c in accuse(bench, *pair)]
    assert isinstance(challenge, ProbeHost)
    for number in range(3):
        bench.beat(worker(number, 0, state="member"), host=f"host-{number + 1}")
    bench.tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))
    assert named(bench) == [1, 2]


def test_a_suspect_that_a_new_scheduler_never_saw_is_evicted_when_the_accusation_lasts() -> None:
    bench = Bench(3)
    bench.submit(1)
    bench.activate()
    bench.submit(2)
    hosts = tuple(bench.hosts.values())
    bench.scheduler = Scheduler(epoch=2, secret="s")
    bench.tell(StateRestored(tuple(bench.records.values()), (bench.newest(),), hosts))
    bench.beat(member(0), member(1))
    for _ in range(4):
        accuse(bench, 0, 2)
        bench.now += 1.0
    assert bench.newest("job-1").is_recovery
    assert named(bench) == [0, 1]
    assert bench.newest().reason == "worker 2 disappeared without a report"


def test_accusations_end_with_the_generation_in_which_they_were_made() -> None:
    bench = two_hosts()
    [probe] = accuse(bench, 0, 2)
    assert isinstance(probe, ProbeHost)
    bench.beat(worker(2, 0, state="member"), gone(3, 1, kind="killed"), host="host-2")
    for _ in range(2):
        bench.tell(ProbeExpired(probe.host, probe.incarnation, bench.beats))
        assert 2 in named(bench), "though its host does not answer: the accusations are over"
        bench.report(switched(0, 1, 2), generation=bench.newest().generation)
    late = PeerSuspected(suspect=2, evidence="broken link", reason="the connection broke")
    assert bench.report(late, worker=0, generation=1) == []


def test_an_accusation_that_is_not_repeated_is_forgotten() -> None:
    suspicions = SuspicionTracker()
    suspicions.add((0, 2), "silence", now=0.0, seconds=3.0)
    suspicions.add((1, 3), "silence", now=2.9, seconds=3.0)
    members = frozenset(range(4))
    assert suspicions.judge(members, now=2.9, seconds=3.0).mute == {2, 3}
    assert suspicions.judge(members, now=3.0, seconds=3.0).mute == {3}
    assert not suspicions.judge(members, now=6.0, seconds=3.0).mute


def test_accusations_of_an_earlier_generation_evict_nobody_in_the_next_one() -> None:
    bench = two_hosts()
    bench.host("host-3", 1)
    bench.beat(worker(4, 0), host="host-3")
    accuse(bench, 0, 2, "silence")
    bench.switch(iteration=7)
    [probe] = accuse(bench, 1, 4)
    assert isinstance(probe, ProbeHost)
    bench.beat(worker(4, 0, state="member"), host="host-3")
    bench.tell(ProbeExpired(probe.host, probe.incarnation, probe.beat))
    assert named(bench) == [0, 1, 2, 3, 4]


def test_a_probe_of_an_earlier_incarnation_of_a_host_says_nothing_of_the_next_one() -> None:
    bench = two_hosts()
    [probe] = accuse(bench, 0, 2)
    assert isinstance(probe, ProbeHost)
    bench.host("host-2", 1, incarnation=2)
    bench.switch(iteration=7)
    place = bench.newest().placements[-1]
    assert (place.host, place.incarnation) == ("host-2", 2)
    address = Address(host="h", port=1)
    joiner = WorkerReport(job="job-1", worker=place.worker, slot=0, state="starting", address=address)
    bench.tell(Heartbeat(host="host-2", incarnation=2, number=1, workers=(joiner,)))
    bench.switch(iteration=9)
    accuse(bench, 0, place.worker)
    bench.tell(ProbeExpired(probe.host, probe.incarnation, probe.beat))
    assert not bench.newest().is_recovery


def test_members_that_wait_for_a_recovery_of_a_complete_job_are_ended() -> None:
    bench = two_hosts()
    bench.report(result(), generation=1)
    assert accuse(bench, 1, 0) == [], "it may be over with the next message"
    bench.beat(gone(0, kind="killed"), member(1))
    bench.now += 2.0
    accuse(bench, 1, 0)
    bench.now += 1.0
    assert accuse(bench, 1, 0) == [StopWorkers("job-1", "host-1", 1, (1,))]
    bench.beat(gone(0, kind="killed"), gone(1, kind="killed"))
    assert bench.records["job-1"].state is JobState.RUNNING, "the others may still run their scripts"
    bench.beat(gone(2, 0, kind="finished"), gone(3, 1, kind="finished"), host="host-2")
    assert bench.records["job-1"].state is JobState.COMPLETED


@pytest.mark.parametrize("answers", [True, False])
def test_a_probe_that_expires_after_the_completion_evicts_nobody_who_is_to_be_ended(answers: bool) -> None:
    bench = two_hosts()
    [probe] = accuse(bench, 0, 2)
    assert isinstance(probe, ProbeHost)
    accuse(bench, 2, 0)
    bench.report(result(), generation=1)
    if answers:
        bench.beat(worker(2, 0, state="member"), worker(3, 1, state="member"), host="host-2")
    bench.tell(ProbeExpired(probe.host, probe.incarnation, probe.beat))
    for _ in range(2):
        bench.now += 1.5
        ended = [*accuse(bench, 0, 2), *accuse(bench, 2, 0)]
    assert ended == [StopWorkers("job-1", "host-1", 1, (0,)), StopWorkers("job-1", "host-2", 1, (2,))]


@pytest.mark.parametrize("kind", ["killed", "out of memory", "abandoned", "not started"])
def test_a_complete_job_does_not_fail_by_the_loss_of_a_member(kind: str) -> None:
    bench = two_hosts()
    bench.report(result(), generation=1)
    bench.beat(gone(0, kind=kind), gone(1, kind="finished"))
    bench.beat(gone(2, 0, kind="finished"), gone(3, 1, kind=kind), host="host-2")
    assert bench.records["job-1"].state is JobState.COMPLETED


pairs = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]), max_size=14)


@given(divided=pairs)
def test_the_largest_set_without_accusations_continues(divided: set[tuple[int, int]]) -> None:
    everyone = frozenset(range(8))
    kept = largest_connected_set(everyone, divided)
    subsets = [frozenset(n for n in everyone if bits >> n & 1) for bits in range(1 << 8)]
    whole = [subset for subset in subsets if not any(subset.issuperset(pair) for pair in divided)]
    assert kept == min(whole, key=lambda subset: (-len(subset), sorted(subset)))


def test_many_separate_accusations_are_judged_one_by_one() -> None:
    everyone = frozenset(range(1000))
    divided = {(number, number + 1) for number in range(0, 1000, 2)}
    assert largest_connected_set(everyone, divided) == frozenset(range(0, 1000, 2))


@given(data=st.data(), num=st.integers(30, 60))
def test_among_many_connected_accusations_nobody_else_could_continue(data: st.DataObject, num: int) -> None:
    everyone = frozenset(range(num))
    chain = {(number, number + 1) for number in range(num - 1)}
    divided = chain | data.draw(
        st.sets(st.tuples(st.integers(0, num), st.integers(0, num)).filter(lambda p: p[0] != p[1]))
    )
    kept = largest_connected_set(everyone, divided)
    opposed = {number for pair in divided for number in pair if not kept.isdisjoint(set(pair) - {number})}
    assert kept.isdisjoint(opposed)
    assert kept | opposed >= everyone


def test_a_new_scheduler_answers_the_loss_of_a_member_that_the_newest_generation_does_not_name() -> None:
    """It was about to leave when the last scheduler ended: the others train with it still, and wait for a recovery."""
    bench = running(2)
    bench.submit(2)
    assert named(bench) == [0]
    bench.restart()
    bench.beat(member(0), member(1))
    [probe] = accuse(bench, 0, 1, "silence")
    assert isinstance(probe, ProbeHost)
    accuse(bench, 1, 0)
    bench.beat(member(0), member(1))
    bench.tell(ProbeExpired(probe.host, probe.incarnation, probe.beat))
    assert bench.newest().is_recovery
    assert named(bench) == [0]
