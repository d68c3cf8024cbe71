"""Sums from device to device: the bits of the tree, and nobody waits for ever, whatever ends in the middle of what."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.collectives import exchange as exchange_module
from resile_learner.collectives.device import communicators
from resile_learner.collectives.device.bucket_plan import plan_bucket
from resile_learner.collectives.device.carriers import DeviceStuck
from resile_learner.collectives.device.communicator import Condition
from resile_learner.collectives.device.communicators import VARIABLE, exchange_device
from resile_learner.collectives.device.peer_store import Board
from resile_learner.collectives.device.process_group import DeviceGroup as Group
from resile_learner.collectives.device.process_group import Operand
from resile_learner.collectives.exchange import Exchange
from resile_learner.collectives.spec import Abandoned, Repeated, RoundSpec, Tag
from resile_learner.collectives.tree import pieces, ranges
from resile_learner.streams import SideStream

from .device_group import DeviceGroup
from .link_group import PATIENCE_SECONDS, abandoned, check_round, make_work, push_all, same_bits, start, wait

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NOBODY = -1


class Watched:
    """A process group that counts its operations, and calls ``on_operation`` before each, with its number."""

    def __init__(self, group: Group, on_operation: Callable[[int], None]) -> None:
        self.rank = group.rank
        self.group = group
        self.num_operations = 0
        self.failure = ""
        self.is_aborted = threading.Event()
        self._on_operation = on_operation

    @property
    def has_released_memory(self) -> bool:
        return self.group.has_released_memory

    def send_receive(self, sends: Sequence[Operand], receives: Sequence[Operand]) -> None:
        self._begin()
        self.group.send_receive(sends, receives)

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        self._begin()
        self.group.gather(whole, own)

    def _begin(self) -> None:
        self._on_operation(self.num_operations)
        self.num_operations += 1

    def error(self) -> str:
        return self.failure or self.group.error()

    def abort(self) -> None:
        self.group.abort()
        self.is_aborted.set()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], None]], dict[int, Watched]]:
    """Have a function called before each operation of a process group, with its rank and the operation's number."""

    def watch(on_operation: Callable[[int, int], None] = lambda rank, number: None) -> dict[int, Watched]:
        connect = communicators.connect
        made: dict[int, Watched] = {}

        def connect_watched(*args: Any, rank: int, **options: Any) -> Group:
            group = connect(*args, rank=rank, **options)
            made[rank] = Watched(group, lambda number: on_operation(rank, number))
            return made[rank]

        monkeypatch.setattr(communicators, "connect", connect_watched)
        return made

    return watch


@pytest.fixture
def make_group() -> Iterator[Callable[[int], DeviceGroup]]:
    made: list[DeviceGroup] = []

    def make(num_nodes: int) -> DeviceGroup:
        made.append(DeviceGroup(num_nodes))
        return made[-1]

    yield make
    for group in made:
        group.close()


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 24), st.integers(0, 300_000), st.sampled_from([2, 4, 8]))
def test_every_part_of_every_piece_reaches_each_rank_that_folds_it(
    num_ranks: int, num_leaves: int, length: int, element_bytes: int
) -> None:
    held = tuple(pieces(num_leaves, range_) for range_ in ranges(num_leaves, num_ranks))
    plans = [plan_bucket(held, num_leaves, length, element_bytes, rank) for rank in range(num_ranks)]
    owned = [element for plan in plans for element in range(*plan.own)] if length < 5000 else []
    assert owned == list(range(len(owned)))
    for rank, plan in enumerate(plans):
        assert (plan.gathered.stop, plan.tail.stop) == (plan.tail.start, length)
        filled = Counter((part.row, part.column) for part in (*plan.kept, *plan.receives))
        assert all(count == 1 for count in filled.values())
        columns = [0] * bool(plan.own.length) + [plan.own.length] * bool(plan.tail.length)
        assert filled.keys() == {(row, column) for row in range(plan.num_rows) for column in columns}
        for peer, other in enumerate(plans):
            sent = [(part.piece, part.span, part.row) for part in plan.sends if part.peer == peer]
            received = [(part.piece, part.span, part.row) for part in other.receives if part.peer == rank]
            assert sent == (received if peer != rank else [])


@pytest.mark.parametrize("num_members", range(2, 9))
def test_gloo_gives_the_sums_of_a_single_process(make_group, watched, num_members: int) -> None:
    made = watched()
    group = make_group(num_members)
    rounds = [(num_leaves, dtype) for num_leaves in (1, num_members, 2 * num_members + 1, 24) for dtype in FLOATS]
    for number, (num_leaves, dtype) in enumerate(rounds):
        work = make_work(num_leaves, [0, 15, 1001, 40_003], dtype, seed=number)
        check_round(group, list(range(num_members)), Tag(1, number), work)
    assert [made[rank].num_operations > len(rounds) for rank in range(num_members)] == [True] * num_members


def test_overflows_denormals_and_signed_zeros_have_the_bits_of_the_tree(make_group) -> None:
    special = [float("inf"), 6e4, -6e4, 1e-7, -1e-7, -0.0, 0.0, 3e-5]
    leaves = [torch.tensor(special[shard:] + special[:shard], dtype=torch.float16).repeat(900) for shard in range(5)]
    group = make_group(3)
    work = make_work(5, [7200], torch.float16)
    check_round(group, [0, 1, 2], Tag(1, 0), type(work)(5, [leaves]))


END = ["is killed", "is frozen", "leaves the round"]


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("operation", range(5))
def test_whenever_a_member_ends_the_others_continue_with_the_same_bits(
    make_group, watched, operation: int, end: str
) -> None:
    """Of two buckets, each with an exchange and a gather; operation 4 is the header."""
    members = [0, 1, 2, 3]
    reached, released = threading.Event(), threading.Event()

    def on_operation(rank: int, number: int) -> None:
        if rank == 3 and number == operation and not reached.is_set():
            reached.set()
            released.wait(PATIENCE_SECONDS)

    watched(on_operation)
    group = make_group(4)
    work = make_work(8, [70_000, 50_001])
    specs = [work.spec(worker, members, Tag(1, 7)) for worker in members]
    opened = [start(lambda w=w: group.nodes[w].begin(specs[w])) for w in members]
    doomed, *rounds = reversed([each.result(PATIENCE_SECONDS) for each in opened])
    push_all(doomed, specs[3])
    calls = [start(lambda w=w: _finish(rounds[2 - w], specs[w])) for w in range(3)]
    if operation < 4:
        assert reached.wait(PATIENCE_SECONDS)
    try:
        if end == "is killed":
            group.kill(3)
        elif end == "is frozen":
            group.nodes[1].poller.abort_round(3, "frozen", generation=1)
        else:
            group.nodes[3].poller.abort_round(3, "left", generation=1)
            released.set()  # its own thread must come out of the operation before the memory is used again
            with pytest.raises(Abandoned):
                doomed.finish(b"")
        assert [abandoned(call).suspect for call in calls] == [3, 3, 3]
    finally:
        released.set()
    check_round(group, [0, 1, 2], Tag(2, 7), work)
    assert not any(node.reports for node in group.nodes), "the loss of a member is no reason to blame a device"


def _finish(opened: Any, spec: RoundSpec) -> tuple[bytes, ...]:
    push_all(opened, spec)
    return opened.finish(b"")  # type: ignore[no-any-return]


@pytest.mark.parametrize("operation", range(4))
def test_a_device_that_fails_makes_all_members_repeat_the_round_over_tcp(make_group, watched, operation: int) -> None:
    failures = iter([RuntimeError("an uncorrectable ECC error")])

    def on_operation(rank: int, number: int) -> None:
        if rank == 1 and number == operation:
            for failure in failures:
                raise failure

    made = watched(on_operation)
    group = make_group(3)
    work = make_work(6, [70_000, 50_001])
    specs = [work.spec(worker, [0, 1, 2], Tag(1, 0)) for worker in range(3)]
    calls = [start(lambda w=w: group.nodes[w].run_round(specs[w])) for w in range(3)]
    assert all(isinstance(call.exception(PATIENCE_SECONDS), Repeated) for call in calls)
    before = [made[rank].num_operations for rank in range(3)]
    for number in (1, 2):
        check_round(group, [0, 1, 2], Tag(1, number), work)
    assert before == [made[rank].num_operations for rank in range(3)]
    assert "an uncorrectable ECC error" in group.nodes[1].reports[0]
    check_round(group, [0, 1], Tag(2, 3), work)
    assert made[0].num_operations, "the next generation uses its devices again"


def test_an_error_that_no_call_raises_makes_all_members_repeat_the_round(
    make_group, watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's operations are queued: an error shows when it is asked for, and an abort ends the wait as success does."""
    made = watched()

    def wait_for_device() -> None:
        made[1].failure = "NCCL error: remote process exited or there was a network error"
        assert made[1].is_aborted.wait(PATIENCE_SECONDS)

    def check_and_wait() -> None:
        check()
        if communicator.condition is Condition.ENDED:
            communicator._thread.join(PATIENCE_SECONDS)

    group = make_group(3)
    work = make_work(6, [70_000, 50_001])
    specs = [work.spec(worker, [0, 1, 2], Tag(1, 0)) for worker in range(3)]
    opened = wait([start(lambda w=w: group.nodes[w].begin(specs[w])) for w in range(3)])
    monkeypatch.setattr(opened[1]._exchange._stream, "wait", wait_for_device)
    communicator = group.nodes[1].communicators.of(1)
    check = communicator.check
    monkeypatch.setattr(communicator, "check", check_and_wait)
    calls = [start(lambda w=w: _finish(opened[w], specs[w])) for w in range(3)]
    assert all(isinstance(call.exception(PATIENCE_SECONDS), Repeated) for call in calls)
    assert "remote process exited" in group.nodes[1].reports[0]
    check_round(group, [0, 1, 2], Tag(1, 1), work)


class LateCopy:
    """The event of copies that are made when it has been asked three times: whoever reads them earlier reads others."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._targets = targets
        self._sources = sources
        self._num_queries = 0

    def query(self) -> bool:
        self._num_queries += 1
        if self._num_queries == 3:
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)
        return self._num_queries >= 3


def test_gradients_that_leave_the_device_late_are_sent_when_they_are_there(
    make_group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP and through the host's memory, where a hook does not wait for the device either."""
    monkeypatch.setattr(exchange_module, "CPU", torch.device("meta"))
    monkeypatch.setattr(SideStream, "copy", lambda stream, targets, sources: LateCopy(targets, sources))
    group = make_group(3)
    exchanges = [_plain_exchange(node) for node in group.nodes]
    for number in range(3):
        assert _check(exchanges, number=number) == ["copied from the devices; over TCP"] * 3


def test_a_worker_ends_if_its_device_does_not_leave_an_abandoned_round(
    make_group, watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued behind aborted operations still writes sums; so the memory must not be used again."""
    watched()
    group = make_group(2)
    work = make_work(4, [70_000])
    spec = work.spec(0, [0, 1], Tag(1, 0))
    opened = start(lambda: group.nodes[0].begin(spec)).result(PATIENCE_SECONDS)
    opened.push(0)
    monkeypatch.setattr(SideStream, "drain", lambda stream, seconds: False)
    with pytest.raises(DeviceStuck):
        opened.abandon()


def test_members_that_agree_in_a_round_use_their_devices_from_the_next(make_group, watched) -> None:
    made = watched()
    group = make_group(3)
    exchanges = [_plain_exchange(node) for node in group.nodes]
    for node in group.nodes:
        node.communicators.want({1: (0, 1, 2)})
    for node in group.nodes:
        communicator = node.communicators.of(1)
        assert communicator is not None
        communicator.await_forming(PATIENCE_SECONDS)
    assert [exchange.needs_agreement((1, (0, 1, 2))) for exchange in exchanges] == [True] * 3
    nothing = RoundSpec(Tag(1, 0), (0, 1, 2), ((), (), ()), 0, (), ())
    wait([start(lambda w=w: exchanges[w].begin(nothing).finish(b"")) for w in range(3)])
    assert [exchange.needs_agreement((1, (0, 1, 2))) for exchange in exchanges] == [False] * 3
    assert _check(exchanges, number=1) == ["from device to device"] * 3
    assert [made[rank].num_operations for rank in range(3)] == [2, 2, 2]


def test_a_member_that_cannot_form_keeps_all_on_tcp_and_says_why(
    make_group, watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it: rounds go on while the others still try."""
    monkeypatch.setattr(communicators, "FORMING_SECONDS", 2.0)
    made = watched()
    group = make_group(3)
    exchanges = [_plain_exchange(node) for node in group.nodes]
    for worker in (0, 1):
        group.nodes[worker].communicators.want({1: (0, 1, 2)})
    for number in range(5):
        _check(exchanges, number=number)
    for worker in (0, 1):
        communicator = group.nodes[worker].communicators.of(1)
        assert communicator is not None
        communicator.await_forming(PATIENCE_SECONDS)
        assert communicator.condition is Condition.ENDED
    assert _check(exchanges, number=5) == ["over TCP"] * 3
    first, second, third = _check(exchanges, number=6)
    assert first.startswith("over TCP; not from device to device: ")
    assert second.startswith("over TCP; not from device to device: ")
    assert third == "over TCP"
    assert not made
    assert all("over TCP" in group.nodes[worker].reports[0] for worker in (0, 1))


def test_a_member_that_forms_late_is_waited_for_in_the_background(make_group, watched) -> None:
    made = watched()
    group = make_group(2)
    exchanges = [_plain_exchange(node) for node in group.nodes]
    group.nodes[0].communicators.want({1: (0, 1)})
    for number in range(3):
        _check(exchanges, number=number)
    assert not group.nodes[0].communicators.is_settled(1)
    group.nodes[1].communicators.want({1: (0, 1)})  # has kept the entries that came before
    for node in group.nodes:
        communicator = node.communicators.of(1)
        assert communicator is not None
        communicator.await_forming(PATIENCE_SECONDS)
    for number in range(3, 5):  # all say it in the first of these rounds
        _check(exchanges, number=number)
    assert [made[rank].num_operations for rank in range(2)] == [2, 2]


def test_an_old_generation_that_still_ends_does_not_hold_up_the_new_one(make_group, watched) -> None:
    stuck, released = threading.Event(), threading.Event()

    def on_operation(rank: int, number: int) -> None:
        if rank == 2 and not stuck.is_set():
            stuck.set()
            released.wait(PATIENCE_SECONDS)

    watched(on_operation)
    group = make_group(3)
    work = make_work(6, [70_000])
    specs = [work.spec(worker, [0, 1, 2], Tag(1, 0)) for worker in range(3)]
    frozen = group.nodes[2].begin(specs[2])
    push_all(frozen, specs[2])
    assert stuck.wait(PATIENCE_SECONDS)
    group.nodes[0].poller.abort_round(2, "frozen", generation=1)
    calls = [start(lambda w=w: group.nodes[w].run_round(specs[w])) for w in (0, 1)]
    assert [abandoned(call).suspect for call in calls] == [2, 2]
    for number in range(3):
        check_round(group, [0, 1], Tag(2, number), work)
    released.set()


def test_twenty_changes_leave_no_thread_and_no_descriptor_behind() -> None:
    warm = DeviceGroup(2)  # torch and the tests have threads of their own from here on
    check_round(warm, [0, 1], Tag(1, 0), make_work(2, [50_000]))
    warm.close()
    before = _settled_counts()
    group = DeviceGroup(4)
    work = make_work(8, [50_000])
    counts = []
    for generation in range(1, 21):
        members = [[0, 1], [0, 1, 2, 3], [1, 2, 3]][generation % 3]
        check_round(group, members, Tag(generation, generation), work)
        for worker in set(range(4)) - set(members):
            group.nodes[worker].communicators.want({})
        counts.append((members, _settled_counts()))
    by_members = {tuple(members): [count for same, count in counts if same == members] for members, _ in counts}
    for same in by_members.values():
        assert _is_no_more(same[-1], than=same[1]), counts
    group.close()
    assert _is_no_more(_settled_counts(), than=before)


def _is_no_more(counts: tuple[int, int], *, than: tuple[int, int]) -> bool:
    return all(now <= then for now, then in zip(counts, than, strict=True))


def _settled_counts() -> tuple[int, int]:
    """Threads and descriptors of this process, once they stay the same for a moment."""
    gc.collect()
    last, same = (-1, -1), 0
    while same < 10:
        time.sleep(0.02)
        now = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        same, last = (same + 1 if now == last else 0), now
    return last


def _plain_exchange(node: Any) -> Exchange:
    return Exchange(node.poller, node.exchange._links, node.communicators, node.reports.append)


def _check(exchanges: Sequence[Exchange], *, number: int) -> list[str]:
    """One round over all, in generation 1; return their paths."""
    members = list(range(len(exchanges)))
    work = make_work(5, [70_000], seed=number)
    specs = [work.spec(worker, members, Tag(1, number)) for worker in members]

    def run(worker: int) -> str:
        opened = exchanges[worker].begin(specs[worker])
        push_all(opened, specs[worker])  # type: ignore[arg-type]
        opened.finish(b"")
        return opened.path

    calls = [start(lambda w=w: run(w)) for w in members]
    paths = [call.result(PATIENCE_SECONDS) for call in calls]
    for spec in specs:
        assert all(map(same_bits, spec.sums, work.sums()))
    return paths


def test_entries_of_strangers_and_of_old_generations_take_no_memory() -> None:
    board = Board()
    for number in range(10_000):
        board.put(str(number), b"x")
    assert board.has(["4095"])
    assert not board.has(["4096"])
    them = communicators.Communicators(0, host="127.0.0.1", send=lambda *_: None, notify=lambda: None)
    for generation in range(1, 100):
        them.receive(generation, "key", b"value")
    assert len(them._boards) <= communicators.MAX_BOARDS + 1


@pytest.mark.parametrize(
    ("devices", "choice", "expected"),
    [
        (["cuda:0"], "", "cuda:0"),
        (["cuda:0"], "off", None),
        (["cuda:0", "cuda:1"], "", None),
        (["cuda:0", "cpu"], "", None),
        (["cpu"], "", None),
        (["cpu"], "gloo", "cpu"),
        ([], "gloo", None),
    ],
)
def test_parameters_on_one_gpu_choose_the_exchange_on_devices(
    devices: Sequence[str], choice: str, expected: str | None
) -> None:
    chosen = exchange_device({torch.device(device) for device in devices}, {VARIABLE: choice})
    assert chosen == (torch.device(expected) if expected else None)
