"""The registry's decisions, tried without a bus or a clock."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resile_registry.core import (
    Announcement,
    Command,
    Event,
    HeartbeatReceived,
    HostChangeRequested,
    HostsLoaded,
    Publish,
    Registry,
    RemoveHost,
    Reply,
    StoreHost,
    Tick,
)
from resile_shared.messages.commands import Accepted, HostDrain, HostUndrain, Refused
from resile_shared.messages.hosts import HostGoodbye, HostHello, HostRecord, HostState, Slot
from resile_shared.version import VERSION

DETECTION = 3.0
TICK = 0.25


def hello(host: str, incarnation: int = 1, slots: int = 4, version: str = VERSION) -> HostHello:
    return HostHello(
        host=host,
        incarnation=incarnation,
        address="127.0.0.1",
        slots=tuple(Slot(index=index) for index in range(slots)),
        device_class="cpu",
        version=version,
    )


def beat(host: str, incarnation: int = 1) -> HeartbeatReceived:
    return HeartbeatReceived(host, incarnation)


@dataclass
class Bench:
    """A registry, a clock that the test moves, and what was stored and published."""

    registry: Registry = field(default_factory=lambda: Registry(detection_seconds=DETECTION, tick_seconds=TICK))
    now: float = 1000.0
    stored: dict[str, HostRecord] = field(default_factory=dict)
    published: list[tuple[str, str, int]] = field(default_factory=list)
    known: set[tuple[str, str, int, datetime]] = field(default_factory=set)

    def tell(self, event: Event) -> list[Command]:
        commands = self.registry.handle(event, now=self.now)
        for command in commands:
            match command:
                case StoreHost(record):
                    self.stored[record.host] = record
                case Publish(event=told):
                    assert self.stored[told.host].incarnation == told.incarnation, "stored before it is told"
                    self._publish(told)
        return commands

    def _publish(self, told: Announcement) -> None:
        """Do as the bus does: what is published again is dropped."""
        key = (type(told).__name__, told.host, told.incarnation, told.time)
        if key not in self.known:
            self.known.add(key)
            self.published.append(key[:3])

    def listen(self, seconds: float, *, beating: dict[str, int] | None = None) -> None:
        """Let time pass with its ticks; the hosts of ``beating`` beat once a second."""
        for step in range(1, round(seconds / TICK) + 1):
            self.now += TICK
            if step % 4 == 0:
                for host, incarnation in (beating or {}).items():
                    self.tell(beat(host, incarnation))
            self.tell(Tick())

    def restart(self) -> None:
        self.registry = Registry(detection_seconds=DETECTION, tick_seconds=TICK)
        self.tell(HostsLoaded(tuple(self.stored.values())))


def test_a_host_joins_once_however_often_it_says_hello() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    assert bench.tell(hello("host-1")) == []
    assert bench.published == [("HostJoined", "host-1", 1)]
    assert bench.stored["host-1"].state is HostState.UP


def test_what_an_earlier_registry_stored_and_may_not_have_published_is_published_again() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.listen(600.0, beating={"host-1": 1})
    joined = bench.registry.handle(hello("host-2"), now=bench.now)
    commands = Registry().handle(
        HostsLoaded((*bench.stored.values(), *(c.record for c in joined if isinstance(c, StoreHost)))), now=bench.now
    )
    assert commands == [command for command in joined if isinstance(command, Publish)]


@pytest.mark.parametrize(("version", "name"), [("0.0.1", "Resile 0.0.1"), ("", "an older version of Resile")])
def test_a_host_of_another_version_does_not_join_and_is_answered_once(version: str, name: str) -> None:
    bench = Bench()
    bench.tell(hello("host-1", 1, version=version))
    record = bench.stored["host-1"]
    assert record.state is HostState.LEFT
    assert record.reason == (
        f"it runs {name}, but its pool runs Resile {VERSION}: install the pool's version and start again"
    )
    for incarnation in range(1, 9):
        assert bench.tell(hello("host-1", incarnation, version=version)) == []
        assert bench.tell(beat("host-1", incarnation)) == []
    bench.tell(hello("host-1", 9))
    assert bench.stored["host-1"].state is HostState.UP


def test_a_host_of_another_version_takes_nobodys_name() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    assert bench.tell(hello("host-1", 2, version="0.0.1")) == []
    assert bench.stored["host-1"].state is HostState.UP
    bench.tell(HostGoodbye(host="host-1", incarnation=1))
    bench.tell(hello("host-1", 2, version="0.0.1"))
    assert "runs Resile 0.0.1" in bench.stored["host-1"].reason


def test_hosts_of_another_version_have_left_when_their_pool_was_upgraded() -> None:
    bench = Bench()
    for host in ("host-1", "host-2"):
        bench.tell(hello(host))
    bench.stored["host-1"] = bench.stored["host-1"].model_copy(update={"version": "0.0.1"})
    bench.restart()
    assert bench.published[2:] == [("HostLeft", "host-1", 1)]
    assert "runs Resile 0.0.1" in bench.stored["host-1"].reason
    assert bench.tell(hello("host-1", version="0.0.1")) == []
    bench.listen(60.0, beating={"host-1": 1, "host-2": 1})
    assert {name: record.state for name, record in bench.stored.items()} == {
        "host-1": HostState.LEFT,
        "host-2": HostState.UP,
    }


def test_a_silent_host_is_lost_and_one_that_beats_is_not() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.tell(hello("host-2"))
    bench.listen(DETECTION, beating={"host-2": 1})
    assert len(bench.published) == 2
    bench.listen(TICK, beating={"host-2": 1})
    assert bench.published[2:] == [("HostLost", "host-1", 1)]
    assert bench.stored["host-1"].reason == "silent for 3 seconds"
    bench.listen(60.0, beating={"host-2": 1})
    assert len(bench.published) == 3


def test_a_gap_of_the_registry_extends_every_deadline_and_resets_none() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.listen(1.0)
    bench.tell(hello("host-2"))
    bench.listen(1.0)
    bench.now += 3600.0
    bench.tell(Tick())
    assert len(bench.published) == 2, "the first tick after the gap finds nobody lost"
    bench.listen(1.0)
    assert bench.published[2:] == [("HostLost", "host-1", 1)], "two seconds of silence before the gap still count"
    bench.listen(1.0)
    assert bench.published[3:] == [("HostLost", "host-2", 1)]


def test_a_clock_that_is_set_back_loses_nobody() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.now -= 5000.0
    bench.tell(Tick())
    bench.listen(10.0, beating={"host-1": 1})
    assert bench.published == [("HostJoined", "host-1", 1)]


def test_a_restarted_registry_gives_every_host_its_whole_time_again() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.tell(hello("host-2"))
    bench.tell(HostGoodbye(host="host-2", incarnation=1))
    bench.now += 600.0
    bench.restart()
    bench.listen(DETECTION)
    assert bench.published[2:] == [("HostLeft", "host-2", 1)]
    bench.listen(TICK)
    assert bench.published[3:] == [("HostLost", "host-1", 1)]


def test_an_old_incarnation_has_no_effect() -> None:
    bench = Bench()
    bench.tell(hello("host-1", 1))
    bench.tell(hello("host-1", 2))
    assert bench.published[1:] == [("HostLost", "host-1", 1), ("HostJoined", "host-1", 2)]
    assert bench.tell(hello("host-1", 1)) == []
    assert bench.tell(HostGoodbye(host="host-1", incarnation=1)) == []
    bench.listen(DETECTION + TICK, beating={"host-1": 1})
    assert bench.published[3:] == [("HostLost", "host-1", 2)], "beats of an old incarnation do not keep a host alive"


def test_a_lost_incarnation_stays_lost_and_a_higher_one_joins() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.listen(DETECTION + TICK)
    assert bench.tell(hello("host-1")) == []
    assert bench.tell(beat("host-1")) == []
    assert bench.stored["host-1"].state is HostState.LOST
    bench.tell(hello("host-1", 2))
    assert bench.stored["host-1"].state is HostState.UP


def test_goodbye_is_at_once() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.tell(HostGoodbye(host="host-1", incarnation=1))
    assert bench.tell(HostGoodbye(host="host-1", incarnation=1)) == []
    assert bench.published[1:] == [("HostLeft", "host-1", 1)]


def test_a_change_of_slots_is_told() -> None:
    bench = Bench()
    bench.tell(hello("host-1", slots=4))
    bench.now += 1.0
    bench.tell(hello("host-1", slots=2))
    assert len(bench.stored["host-1"].slots) == 2
    assert len(bench.published) == 2


def test_a_drain_happens_once_and_is_answered_every_time() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    drain = HostChangeRequested("c1", HostDrain(host_id="host-1", deadline_seconds=30.0))
    assert bench.tell(drain)[-1] == Reply("c1", Accepted())
    bench.tell(HostGoodbye(host="host-1", incarnation=1))
    bench.tell(hello("host-1", 2))
    assert bench.tell(drain) == [Reply("c1", Accepted())], "the same request does not drain the host that came back"
    assert bench.published.count(("HostDraining", "host-1", 1)) == 1
    assert bench.stored["host-1"].state is HostState.UP


def test_a_host_that_drains_goes_on_draining_however_often_it_says_hello() -> None:
    bench = Bench()
    bench.tell(hello("host-1", slots=4))
    bench.tell(HostChangeRequested("c1", HostDrain(host_id="host-1", deadline_seconds=30.0)))
    drained = bench.stored["host-1"]
    assert bench.tell(hello("host-1", slots=4)) == []
    bench.tell(hello("host-1", slots=2))
    changed = bench.stored["host-1"]
    assert (changed.state, changed.drain_deadline) == (HostState.DRAINING, drained.drain_deadline)
    assert len(changed.slots) == 2


def test_a_drain_of_nobody_is_refused_with_a_reason() -> None:
    bench = Bench()
    [reply] = bench.tell(HostChangeRequested("c1", HostDrain(host_id="host-9")))
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, Refused)
    assert "there is no host host-9" in reply.answer.reason


def test_a_draining_host_that_goes_silent_is_lost() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    bench.tell(HostChangeRequested("c1", HostDrain(host_id="host-1")))
    bench.listen(DETECTION + TICK)
    assert bench.stored["host-1"].state is HostState.LOST


def drain(bench: Bench, command: str, **options: Any) -> Accepted | Refused:
    return answer_of(bench.tell(HostChangeRequested(command, HostDrain(host_id="host-1", **options))))


def undrain(bench: Bench, command: str) -> Accepted | Refused:
    return answer_of(bench.tell(HostChangeRequested(command, HostUndrain(host_id="host-1"))))


def answer_of(commands: list[Command]) -> Accepted | Refused:
    reply = commands[-1]
    assert isinstance(reply, Reply)
    return reply.answer


def test_a_host_that_is_undrained_takes_workers_again() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    drain(bench, "c1", deadline_seconds=30.0)
    bench.now += 1.0
    assert undrain(bench, "c2") == Accepted()
    record = bench.stored["host-1"]
    assert (record.state, record.reason, record.drain_deadline) == (HostState.UP, "no longer drained", None)
    bench.now += 1.0
    assert undrain(bench, "c3") == Accepted(), "there is nothing left to do"
    assert [kind for kind, _, _ in bench.published] == ["HostJoined", "HostDraining", "HostJoined"]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_hello_that_arrives_again_neither_ends_a_drain_nor_begins_one_again(*, restarts: bool) -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    for number, (change, state) in enumerate([(drain, HostState.DRAINING), (undrain, HostState.UP)]):
        change(bench, f"c{number}")
        if restarts:
            bench.restart()
        num_published = len(bench.published)
        assert bench.tell(hello("host-1")) == []
        assert bench.stored["host-1"].state is state
        assert len(bench.published) == num_published


def test_a_request_has_its_effect_once_though_the_registry_restarts() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    drain(bench, "c1")
    drain(bench, "c2")  # changes nothing
    undrain(bench, "c3")
    bench.restart()
    for command in ("c1", "c2"):
        assert drain(bench, command) == Accepted()
    assert bench.stored["host-1"].state is HostState.UP
    drain(bench, "c4")
    bench.restart()
    assert undrain(bench, "c3") == Accepted()
    assert bench.stored["host-1"].state is HostState.DRAINING


def test_a_drained_host_that_is_lost_can_be_undrained_and_one_that_is_only_lost_cannot() -> None:
    bench = Bench()
    bench.tell(hello("host-1"))
    drain(bench, "c1")
    bench.listen(DETECTION + TICK)
    assert undrain(bench, "c2") == Accepted()
    answer = undrain(bench, "c3")
    assert isinstance(answer, Refused)
    assert answer.reason == "host host-1 is lost and runs no workers: there is nothing to undrain"
    bench.tell(hello("host-1", 2))
    assert bench.stored["host-1"].state is HostState.UP


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["hello", "again", "leaves", "silent", "drain", "undrain", "restart"]), max_size=20))
def test_a_host_that_is_there_is_drained_from_a_drain_to_its_end(steps: list[str]) -> None:
    bench = Bench()
    incarnation, is_here, is_drained = 0, False, False
    for number, step in enumerate(["hello", *steps]):
        bench.now += 1.0
        match step:
            case "hello":
                incarnation, is_here = incarnation + 1, True
                bench.tell(hello("host-1", incarnation))
            case "again":
                assert bench.tell(hello("host-1", incarnation)) == []
            case "leaves":
                is_drained, is_here = is_drained and not is_here, False
                bench.tell(HostGoodbye(host="host-1", incarnation=incarnation))
            case "silent":
                is_here = False
                bench.listen(DETECTION + 2 * TICK)
            case "drain":
                is_accepted = isinstance(drain(bench, f"c{number}"), Accepted)
                assert is_accepted == is_here
                is_drained = is_drained or is_here
            case "undrain":
                is_accepted = isinstance(undrain(bench, f"c{number}"), Accepted)
                assert is_accepted == (is_here or is_drained)
                is_drained = False
            case "restart":
                bench.restart()
        expected = {HostState.DRAINING if is_drained else HostState.UP} if is_here else {HostState.LOST, HostState.LEFT}
        assert bench.stored["host-1"].state in expected


def test_a_host_that_is_gone_for_long_is_forgotten_and_may_come_back_as_a_new_one() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.tell(hello(name, incarnation=7))
    bench.tell(HostGoodbye(host="a", incarnation=7))
    bench.now += 89 * 86400.0
    bench.tell(beat("b", 7))
    assert [c for c in bench.tell(Tick()) if isinstance(c, RemoveHost)] == []
    bench.now += 2 * 86400.0
    assert [c for c in bench.tell(Tick()) if isinstance(c, RemoveHost)] == [RemoveHost("a")]
    assert set(bench.registry.hosts) == {"b"}, "one that is there is kept, however long it has been"
    bench.tell(hello("a"))
    assert bench.registry.hosts["a"].incarnation == 1


def test_ten_thousand_hosts_beat_without_a_false_loss() -> None:
    bench = Bench()
    names = [f"host-{number}" for number in range(10_000)]
    for name in names:
        bench.tell(hello(name, slots=1))
    for _ in range(5):
        bench.now += TICK
        for name in names:
            bench.tell(beat(name))
        bench.tell(Tick())
    assert len(bench.published) == len(names)


HOSTS = ("host-1", "host-2", "host-3")


class AnyOrder(RuleBasedStateMachine):
    """Hosts come, beat, go silent, return and leave, the registry stops and restarts, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.incarnations: dict[str, int] = {}
        self.beating: set[str] = set()
        self.silence: dict[str, float] = {}  # listening time since the last word
        self.said: list[HostHello | HostGoodbye] = []  # what the bus keeps, and may bring again

    def current(self, host: str) -> bool:
        record = self.bench.stored.get(host)
        return record is not None and record.state in (HostState.UP, HostState.DRAINING)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            for host in self.silence:
                self.silence[host] += 1.0
            self.bench.listen(1.0, beating={host: self.incarnations[host] for host in self.beating})
            self.silence.update(dict.fromkeys(self.beating, 0.0))

    @rule(host=st.sampled_from(HOSTS))
    def a_host_comes(self, host: str) -> None:
        self.incarnations[host] = self.incarnations.get(host, 0) + 1
        self.said.append(hello(host, self.incarnations[host]))
        self.bench.tell(self.said[-1])
        self.beating.add(host)
        self.silence[host] = 0.0

    @rule(host=st.sampled_from(HOSTS))
    def a_host_goes_silent(self, host: str) -> None:
        self.beating.discard(host)

    @precondition(lambda self: self.beating)
    @rule(data=st.data())
    def a_host_leaves(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.beating)))
        self.beating.discard(host)
        self.said.append(HostGoodbye(host=host, incarnation=self.incarnations[host]))
        self.bench.tell(self.said[-1])
        assert not self.current(host)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def something_arrives_again_and_late(self, data: st.DataObject) -> None:
        again = data.draw(st.sampled_from(self.said))
        is_of_now = again.incarnation == self.incarnations[again.host]
        assert is_of_now or self.bench.tell(again) == []
        if is_of_now and isinstance(again, HostGoodbye):
            assert self.bench.tell(again) == []
        elif is_of_now:
            was_here = self.current(again.host)
            assert self.bench.tell(again) == []
            assert self.current(again.host) == was_here, "who is lost or has left stays so"
            self.silence[again.host] = 0.0

    @rule(host=st.sampled_from(HOSTS), data=st.data())
    def an_old_incarnation_speaks(self, host: str, data: st.DataObject) -> None:
        newest = self.incarnations.get(host, 0)
        if newest < 2:
            return
        old = data.draw(st.integers(1, newest - 1))
        events: list[Event] = [hello(host, old), beat(host, old), HostGoodbye(host=host, incarnation=old)]
        before = dict(self.bench.stored)
        assert self.bench.tell(data.draw(st.sampled_from(events))) == []
        assert self.bench.stored == before

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        self.pass_time(seconds)

    @rule(seconds=st.floats(1.0, 10_000.0))
    def the_registry_stands_still(self, seconds: float) -> None:
        before = list(self.bench.published)
        self.bench.now += seconds
        self.bench.tell(Tick())
        self.bench.listen(TICK, beating={})
        for host in self.silence:  # late ticks count for no more than two of their kind
            self.silence[host] += 2 * TICK + TICK
        lost = [host for kind, host, _ in self.bench.published[len(before) :] if kind == "HostLost"]
        assert not self.beating & set(lost), "a gap is not the loss of those who beat"
        for host in self.beating:
            self.bench.tell(beat(host, self.incarnations[host]))
            self.silence[host] = 0.0

    @rule()
    def the_registry_restarts(self) -> None:
        self.bench.now += 100.0
        self.bench.restart()
        self.silence = dict.fromkeys(self.silence, 0.0)

    @invariant()
    def the_living_are_up(self) -> None:
        assert all(self.current(host) for host in self.beating)

    @invariant()
    def the_silent_are_lost_in_time(self) -> None:
        for host, silent in self.silence.items():
            if silent > DETECTION + TICK:
                assert not self.current(host)

    @invariant()
    def each_transition_is_published_once(self) -> None:
        assert len(set(self.bench.published)) == len(self.bench.published)

    @invariant()
    def every_change_of_a_host_follows_its_coming(self) -> None:
        for host in HOSTS:
            told = [(kind, incarnation) for kind, name, incarnation in self.bench.published if name == host]
            for number, (kind, incarnation) in enumerate(told):
                joined = number == 0 or told[number - 1][0] != "HostJoined"
                assert (kind == "HostJoined") == joined
                assert kind == "HostJoined" or told[number - 1] == ("HostJoined", incarnation)


AnyOrder.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase
