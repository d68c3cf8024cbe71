"""The exchange alone, by members that are threads of the test: what its calls return, and how they fail."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from resile.collectives import (
    Aborted,
    CallsDiffer,
    Group,
    JoinRefused,
    JoinTimeout,
    MemberLost,
    MembersDiffer,
    MemberTimeout,
    Rendezvous,
    RendezvousLost,
    join,
    serve,
)
from resile.collectives.enrollment import Enrollment, Reenrollment
from resile.collectives.member_state import run_state
from resile.collectives.messages import Hello, LeaveRequested
from resile.collectives.rendezvous import parse_address
from resile_learner.collectives.link import Link
from resile_learner.messages import encode
from resile_learner.state.memory import StateError
from resile_shared.errors import UsageError

from .collective_members import PATIENCE_SECONDS, errors, member, results, start

SHARDS = 12


@pytest.fixture(name="rendezvous")
def _rendezvous() -> Iterator[Rendezvous]:
    with serve() as rendezvous:
        yield rendezvous


def value(shard: int) -> list[Tensor]:
    """Values whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(shard)
    return [
        torch.randn(3, 4, generator=generator) * 100,
        torch.randn(700_000, generator=generator),  # large enough to be exchanged in shared memory
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.randn(2, 2, generator=generator).bfloat16(),
        torch.randn(7, generator=generator).t() * 1e-3,
    ]


def reduced(group: Group) -> list[Tensor]:
    group.begin_iteration()
    mean: list[Tensor] = group.all_reduce(value(shard) for shard in group.shards)
    return mean


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_sums_have_the_same_bits_on_any_number_of_members(rendezvous: Rendezvous) -> None:
    expected = None
    for size in (1, 2, 3, 5):
        members = [member(rendezvous.address, reduced, size=size, num_shards=SHARDS) for _ in range(size)]
        means = results(members)
        expected = expected or means[0]
        assert all(same_bits(mean, expected) for mean in means)
    assert expected is not None
    exact = [torch.stack(each).double().mean(0) for each in zip(*map(value, range(SHARDS)), strict=True)]
    for mean, true in zip(expected, exact, strict=True):
        torch.testing.assert_close(mean.double(), true, rtol=0.1, atol=0.05)


def test_without_shards_each_member_gives_one_value(rendezvous: Rendezvous) -> None:
    def work(group: Group) -> tuple[int, float, Tensor]:
        group.begin_iteration()
        assert group.shards == range(group.rank, group.rank + 1)
        count = group.all_reduce([torch.tensor(group.rank + 1)], op="sum")
        mean = group.all_reduce([torch.tensor([float(group.rank)])])
        return group.size, float(mean), count

    ended = results([member(rendezvous.address, work, size=3) for _ in range(3)])
    assert ended == [(3, 1.0, torch.tensor(6))] * 3


def test_a_joiner_receives_the_state_in_place(rendezvous: Rendezvous) -> None:
    has_begun, has_joined, weights = threading.Event(), threading.Event(), torch.zeros(3)
    model = torch.nn.Linear(2, 2)
    parameter = model.weight

    def founder(group: Group) -> None:
        group.begin_iteration()
        group.all_reduce([torch.ones(1)])
        group_state["w"] += 7
        group_state["step"] = 1
        has_begun.set()
        while not has_joined.is_set():
            group.begin_iteration()
            group.all_reduce([torch.ones(1)] * len(group.shards))

    def joiner(group: Group) -> int:
        has_joined.set()
        return group.iteration

    group_state: dict[str, Any] = {"w": torch.zeros(3), "step": 0, "model": torch.nn.Linear(2, 2)}
    own: dict[str, Any] = {"w": weights, "step": 0, "model": model}
    first = member(rendezvous.address, founder, group_state)
    assert has_begun.wait(PATIENCE_SECONDS)
    second = member(rendezvous.address, joiner, own)
    assert results([second])[0] >= 1
    results([first])
    assert own["w"] is weights
    assert own["model"].weight is parameter
    assert torch.equal(weights, torch.full((3,), 7.0))
    assert torch.equal(parameter, group_state["model"].weight)
    assert own["step"] == 1


def test_a_member_whose_state_cannot_be_sent_ends_and_its_joiner_does_not_wait(rendezvous: Rendezvous) -> None:
    has_begun = threading.Event()
    state: dict[str, Any] = {"step": 0}

    def train(group: Group) -> None:
        while True:
            reduced(group)

    def founder(group: Group) -> None:
        state["step"] = object()
        has_begun.set()
        with pytest.raises(StateError, match=r"step is a builtins\.object, which cannot be stored"):
            train(group)
        with pytest.raises(UsageError, match="has left the group"):
            reduced(group)

    first = member(rendezvous.address, founder, state, num_shards=SHARDS)
    assert has_begun.wait(PATIENCE_SECONDS)
    second = member(rendezvous.address, lambda group: group.size, {"step": 0}, num_shards=SHARDS)
    assert results([second]) == [1], "it starts a new group with its own state"
    results([first])


def test_a_joiner_replaces_what_has_another_type_in_the_group() -> None:
    own: dict[str, Any] = {"number": torch.ones(2), "tensor": 0.5, "gone": 1}
    group: dict[str, Any] = {"number": 3, "tensor": torch.zeros(2)}
    sent, joiner = run_state(group, {}).flatten(), run_state(own, {})
    joiner.load(sent.skeleton, sent.tensors)
    assert own["number"] == 3
    assert torch.equal(own["tensor"], torch.zeros(2))
    assert own.keys() == group.keys()


@pytest.mark.parametrize(
    ("others", "odd", "message"),
    [
        (torch.ones(3), torch.ones(4), r"member 2 called all_reduce\(float32 \[4\], .*the others .*float32 \[3\]"),
        (torch.ones(3), torch.ones(3).double(), r"float64 \[3\].* and the others .*float32 \[3\]"),
        (torch.ones(3), [torch.ones(3), torch.ones(1)], r"\[float32 \[3\], float32 \[1\]\].* and the others"),
    ],
)
def test_other_shapes_and_dtypes_are_named_on_all_members(
    rendezvous: Rendezvous, others: Any, odd: Any, message: str
) -> None:
    def work(group: Group) -> float:
        group.begin_iteration()
        with pytest.raises(CallsDiffer, match=message):
            group.all_reduce([odd if group.member == 2 else others])
        return float(group.all_reduce([torch.tensor(1.0)], op="sum"))

    assert results([member(rendezvous.address, work, size=3) for _ in range(3)]) == [3.0] * 3


def test_members_that_call_different_operations_are_named(rendezvous: Rendezvous) -> None:
    def work(group: Group) -> None:
        group.begin_iteration()
        if group.member == 1:
            group.begin_iteration()
        else:
            group.all_reduce([torch.ones(1)])

    ended = errors([member(rendezvous.address, work, size=3) for _ in range(3)])
    assert all(isinstance(error, CallsDiffer) for error in ended), ended
    assert "member 1 called begin_iteration() or leave(), and the others all_reduce(float32 [1]" in str(ended[0])


def test_all_members_learn_that_calls_differ_however_late_one_hears_of_it(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends at once, and must not abort the round of one that lacks a header yet."""
    held = threading.local()
    flush = Link.flush

    def flush_late(link: Link) -> None:
        if link.peer != 1 or time.monotonic() > getattr(held, "until", 0.0):
            flush(link)

    def work(group: Group) -> None:
        group.begin_iteration()
        if group.member == 2:
            held.until = time.monotonic() + 1.0  # nothing that it sends reaches member 1 meanwhile
        group.all_reduce([torch.ones(1 + group.member // 2)])

    monkeypatch.setattr(Link, "flush", flush_late)
    ended = errors([member(rendezvous.address, work, size=3) for _ in range(3)])
    assert all(isinstance(error, CallsDiffer) for error in ended), ended


def test_wrong_values_are_refused_by_the_member_that_gives_them(rendezvous: Rendezvous) -> None:
    with join(rendezvous.address, num_shards=4) as group:
        with pytest.raises(UsageError, match="call begin_iteration"):
            group.all_reduce([torch.ones(1)] * 4)
        group.begin_iteration()
        for values, message in (
            ([torch.ones(1)] * 3, "3 values were given for 4 shards"),
            ([torch.ones(1)] * 6, "6 values were given for 4 shards"),
            ([torch.ones(1), torch.ones(2), torch.ones(1), torch.ones(1)], "the values of two shards differ"),
            ([torch.ones(1) > 0] * 4, "bool tensors cannot be reduced"),
            ([torch.ones(1).to_sparse()] * 4, "a sparse"),
            ([[]] * 4, "a list without tensors"),
            ([torch.ones(1, dtype=torch.int64)] * 4, "int64 tensors have no mean"),
            ([1.0] * 4, "a float was given"),
        ):
            with pytest.raises(UsageError, match=message):
                group.all_reduce(values)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"op is .max.: pass"):
            group.all_reduce([torch.ones(1)] * 4, op="max")  # type: ignore[arg-type]
        assert float(group.all_reduce([torch.ones(1)] * 4, op="sum")) == 4.0


def test_initial_members_with_different_states_are_named(rendezvous: Rendezvous) -> None:
    states = [{"w": torch.zeros(3)}, {"w": torch.zeros(3)}, {"w": torch.ones(3)}]
    ended = errors([member(rendezvous.address, lambda group: None, state, size=3) for state in states])
    assert all(isinstance(error, MembersDiffer) for error in ended), ended
    assert "joined with another state than the others" in str(ended[0])


def test_a_member_that_aborts_is_lost_to_the_others(rendezvous: Rendezvous) -> None:
    def goes_on(group: Group) -> tuple[int, float]:
        while True:
            try:
                return group.size, float(group.all_reduce([torch.ones(1)] * len(group.shards), op="sum"))
            except MemberLost:
                group.begin_iteration()

    def waits(group: Group) -> tuple[int, float]:
        group.begin_iteration()
        if group.member == 0:
            threading.Timer(0.2, group.abort, ["it is over"]).start()
            threading.Event().wait(1.0)
            group.begin_iteration()
        return goes_on(group)

    members = [member(rendezvous.address, waits, size=3, num_shards=6) for _ in range(3)]
    ended = {type(future.exception(PATIENCE_SECONDS)) for future in members}
    assert ended == {Aborted, type(None)}
    assert [future.result() for future in members if future.exception() is None] == [(2, 6.0)] * 2


def test_a_member_that_never_calls_is_named(rendezvous: Rendezvous) -> None:
    release = threading.Event()

    def stays_away() -> None:
        with join(rendezvous.address, size=2) as group:
            group.begin_iteration()
            release.wait(PATIENCE_SECONDS)

    def waits() -> None:
        with join(rendezvous.address, size=2, timeout=5.0) as group:
            group.begin_iteration()
            group.all_reduce([torch.ones(1)])

    away, waiting = start(stays_away), start(waits)
    error = waiting.exception(PATIENCE_SECONDS)
    release.set()
    assert isinstance(error, MemberTimeout)
    assert len(error.missing) == 1
    assert "has not made the call" in str(error)
    away.result(PATIENCE_SECONDS)


def test_a_group_that_lacks_members_says_how_many_have_come(rendezvous: Rendezvous) -> None:
    with pytest.raises(JoinTimeout, match="1 of 3 members have come: start the missing ones"):
        join(rendezvous.address, size=3, timeout=1.0)


def enroll(rendezvous: Rendezvous, size: int, *, is_member: bool = False) -> socket.socket:
    """A process that asks to become a member, and does nothing else."""
    host, port = parse_address(rendezvous.address)
    sock = socket.create_connection((host, port), timeout=PATIENCE_SECONDS)
    sock.sendall(encode(Hello(size=size, num_shards=None, is_member=is_member)))
    return sock


def test_a_start_from_which_a_member_is_lost_is_repeated_with_the_next_that_comes(rendezvous: Rendezvous) -> None:
    with enroll(rendezvous, size=3) as lost:
        others = [member(rendezvous.address, lambda group: group.size, size=3) for _ in range(2)]
        while b"welcome" not in lost.recv(4096):
            pass
    others.append(member(rendezvous.address, lambda group: group.size, size=3))
    assert results(others) == [3] * 3


def test_a_member_of_the_start_that_is_never_heard_of_is_a_join_that_ends(rendezvous: Rendezvous) -> None:
    with enroll(rendezvous, size=2), pytest.raises(JoinTimeout, match="could not be reached"):
        join(rendezvous.address, size=2, timeout=2.0)


def test_a_member_that_was_removed_may_send_before_it_reads_so(rendezvous: Rendezvous) -> None:
    with enroll(rendezvous, size=2) as removed:
        with pytest.raises(JoinTimeout, match="could not be reached"):
            join(rendezvous.address, size=2, timeout=2.0)
        while b"stop" not in (unread := removed.recv(4096, socket.MSG_PEEK)):
            assert unread, "the connection has ended without a word"
            time.sleep(0.01)
        for _ in range(3):  # to a closed connection the first is sent, and the next fails once its answer is here
            removed.sendall(encode(LeaveRequested()))
            time.sleep(0.1)
        assert b"stop" in removed.recv(4096)


def test_garbage_ends_a_connection_and_nothing_else(rendezvous: Rendezvous) -> None:
    host, port = parse_address(rendezvous.address)
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100_000 + b"\n",
        encode(Hello(size=1, num_shards=None)) + b"?\n",
    ):
        with socket.create_connection((host, port), timeout=PATIENCE_SECONDS) as sock:
            sock.sendall(garbage)
            with suppress(ConnectionError):
                while sock.recv(4096):
                    pass
    with join(rendezvous.address) as group:
        assert group.size == 1


def test_the_next_group_starts_when_all_have_left(rendezvous: Rendezvous) -> None:
    for _ in range(2):
        assert (
            results([member(rendezvous.address, lambda group: group.members, size=2) for _ in range(2)]) == [(0, 1)] * 2
        )


def test_a_process_that_does_not_fit_is_refused() -> None:
    inside, release = threading.Event(), threading.Event()

    def stays(group: Group) -> None:
        inside.set()
        release.wait(PATIENCE_SECONDS)

    with serve(token="one") as rendezvous:
        address = rendezvous.address
        first = member(address, stays, num_shards=4, token="one")
        assert inside.wait(PATIENCE_SECONDS)
        with pytest.raises(JoinRefused, match="another token"):
            join(address, num_shards=4, token="two")
        with pytest.raises(JoinRefused, match="another `num_shards` than the group: 5 instead of 4"):
            join(address, num_shards=5, token="one")
        release.set()
        results([first])


def test_a_stranger_that_says_it_is_a_member_sends_nobody_away() -> None:
    with serve(token="right") as rendezvous:
        host, _, port = rendezvous.address.rpartition(":")

        def say(hello: Hello) -> socket.socket:
            sock = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
            sock.sendall(encode(hello))
            return sock

        with say(Hello(size=2, num_shards=None, token="right")) as first, first.makefile() as answers:
            assert "waiting" in answers.readline()
            with (
                say(Hello(size=1, num_shards=None, token="wrong", is_member=True)) as stranger,
                stranger.makefile() as refusal,
            ):
                assert "another token" in refusal.readline()
            with say(Hello(size=2, num_shards=None, token="right")):
                assert "welcome" in answers.readline()


def test_bad_arguments_are_refused() -> None:
    for call, message in (
        (lambda: join("nowhere"), 'pass "host:port"'),
        (lambda: join("127.0.0.1:1", size=0), "1 <= size"),
        (lambda: join("127.0.0.1:1", size=5, num_shards=4), "1 <= size <= num_shards"),
        (lambda: join("127.0.0.1:1", timeout=0), "above 0"),
        (lambda: serve("127.0.0.1:99999"), 'pass "host:port"'),
        (lambda: serve("203.0.113.1:1"), "cannot listen"),
        (lambda: serve(detection_seconds=0), "above 0"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_a_rendezvous_that_is_not_there_and_another_service_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(JoinTimeout, match="has not answered"):
            join(address, timeout=0.5)
        answering = start(lambda: listener.accept()[0].sendall(b"SSH-2.0\n"))
        answering.result(PATIENCE_SECONDS)
    with pytest.raises(JoinTimeout, match="cannot be reached"):
        join(address, timeout=0.5)


def test_a_member_cannot_leave_the_others_without_the_rendezvous(rendezvous: Rendezvous) -> None:
    closed = threading.Event()

    def work(group: Group) -> None:
        group.begin_iteration()
        if group.member == 0:
            rendezvous.close()
            closed.set()
        closed.wait(PATIENCE_SECONDS)
        while group.member == 1 or group.iteration < 20:
            group.begin_iteration()

    ended = errors([member(rendezvous.address, work, size=2) for _ in range(2)])
    assert all(isinstance(error, RendezvousLost) for error in ended), ended


def restarted(rendezvous: Rendezvous) -> Rendezvous:
    rendezvous.close()
    return serve(rendezvous.address)


def test_a_group_continues_at_a_restarted_rendezvous_and_others_join_it_after_that(rendezvous: Rendezvous) -> None:
    """Its iterations and state go on. A process that comes before the members have found each other waits for them."""
    phase = threading.Barrier(3)

    def work(group: Group) -> tuple[int, list[Tensor]]:
        group.begin_iteration()
        phase.wait(PATIENCE_SECONDS)
        phase.wait(PATIENCE_SECONDS)
        while group.size == 2:
            group.begin_iteration()
        return group.iteration, group.all_reduce(value(shard) for shard in group.shards)

    def join_late(group: Group) -> tuple[int, list[Tensor]]:
        mean = reduced(group)
        return group.iteration, mean

    members = [member(rendezvous.address, work, size=2, num_shards=SHARDS) for _ in range(2)]
    phase.wait(PATIENCE_SECONDS)
    with restarted(rendezvous) as second:
        with enroll(second, size=2) as early:
            assert b"waiting" in early.recv(4096)
            phase.wait(PATIENCE_SECONDS)
            assert early.recv(4096) == b"", "it is to ask again"
        late = member(second.address, join_late, {"anything": 7}, size=2, num_shards=SHARDS)
        (iteration, first), *others = results([*members, late])
    assert iteration > 0
    for other, mean in others:
        assert other == iteration
        assert same_bits(first, mean)


def test_others_wait_until_members_have_found_each_other(rendezvous: Rendezvous) -> None:
    with enroll(rendezvous, size=2, is_member=True) as one:
        assert b"waiting" in one.recv(4096)
        with enroll(rendezvous, size=2) as early:
            assert early.recv(4096) == b"", "it is to ask again"


def test_members_of_another_group_are_refused_where_one_has_started(rendezvous: Rendezvous) -> None:
    with enroll(rendezvous, size=1) as first:
        assert b"welcome" in first.recv(4096)
        with enroll(rendezvous, size=1, is_member=True) as late:
            assert b"rejected" in late.recv(4096)


def test_a_member_announces_itself_again_until_it_is_taken(rendezvous: Rendezvous) -> None:
    """Also when the new rendezvous is lost before all members have reached a boundary."""
    hello = Hello(size=1, num_shards=None, is_member=True)
    again = Reenrollment(lambda seconds: Enrollment(rendezvous.address, hello, timeout=seconds))
    wait_until(lambda: again.is_enrolled)
    rendezvous.close()
    wait_until(lambda: not again.is_enrolled)
    assert again.take() is None
    with serve(rendezvous.address) as second:
        again = Reenrollment(lambda seconds: Enrollment(second.address, hello, timeout=seconds))
        wait_until(lambda: again.is_enrolled)
        enrolled = again.take()
        assert enrolled is not None
        assert enrolled.sock.getpeername() == parse_address(second.address)
        enrolled.sock.close()


def test_a_connection_that_is_reset_at_once_is_followed_by_another(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset, far_end = socket.socketpair()
    far_end.close()
    sockets, connect = [reset], socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda *args, **kw: sockets.pop() if sockets else connect(*args, **kw)
    )
    hello = Hello(size=1, num_shards=None)
    enrolled = Enrollment(rendezvous.address, hello, timeout=PATIENCE_SECONDS).enroll()
    assert not sockets
    assert reset.fileno() == -1
    enrolled.sock.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_members_that_are_no_group_any_more_do_not_disturb_the_next_one(rendezvous: Rendezvous) -> None:
    phase = threading.Barrier(3)

    def work(group: Group) -> int:
        group.begin_iteration()
        phase.wait(PATIENCE_SECONDS)
        phase.wait(PATIENCE_SECONDS)
        for _ in range(20):
            group.begin_iteration()
            time.sleep(0.01)
        return group.size

    members = [member(rendezvous.address, work, size=2) for _ in range(2)]
    phase.wait(PATIENCE_SECONDS)
    with restarted(rendezvous) as second:
        assert results([member(second.address, lambda group: (phase.wait(PATIENCE_SECONDS), group.size)[1])]) == [1]
        assert results(members) == [2, 2]


def test_a_member_that_has_left_is_told_to_join_again(rendezvous: Rendezvous) -> None:
    with join(rendezvous.address) as group:
        group.begin_iteration()
    group.leave()
    calls: list[Callable[[], object]] = [group.begin_iteration]
    for call in calls:
        with pytest.raises(UsageError, match="has left the group; call join"):
            call()
