"""Rounds: what must be equal on all members is compared, and all of them learn of a difference."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from resile_learner.changes import ChangeRecorder
from resile_learner.checkpoint.checkpoint_header import CheckpointHeader
from resile_learner.collectives.round import LinkRound
from resile_learner.collectives.spec import Abandoned, OtherRound, RoundSpec, Tag
from resile_learner.session import View
from resile_learner.state.facts import PART, MembersDiffer
from resile_learner.training.buffers import Buffers
from resile_learner.training.header import ComputedShards, PartialSums, RoundHeader
from resile_learner.training.rounds import Rounds
from resile_learner.training.watch.repeatability import ShardFingerprint

from .link_group import PATIENCE_SECONDS, Group, start, wait

GENERATION = 1
MEMBERS = (0, 1, 2)
DIFFERENT = RoundHeader(digest=2, checkpoint=CheckpointHeader())
COMMON = RoundHeader(digest=1, checkpoint=CheckpointHeader())
COMPUTED = RoundHeader(digest=1, checkpoint=CheckpointHeader(), computed=ComputedShards(partials=(PartialSums(),)))


class Member:
    """What `Rounds` needs of a session: one member of ``group``."""

    def __init__(self, group: Group, worker: int) -> None:
        self.view = View(generation=GENERATION, workers=MEMBERS, me=worker)
        self.changes = ChangeRecorder()
        self.worker = worker
        self.group = group
        self.on_begin: Callable[[int], None] = lambda round_: None
        self.trains_on = True

    def begin(self, spec: RoundSpec) -> LinkRound:
        self.on_begin(spec.tag.round)
        return self.group.nodes[self.worker].begin(spec)

    def agree_on_carrier(self, tag: Tag) -> bool:
        return False

    def named(self, next_iteration: int, *, can_pause: bool = False) -> int:
        return GENERATION

    def is_member_of(self, generation: int) -> bool:
        return self.trains_on

    def run(self, header: RoundHeader, *, num_leaves: int = 0, gradients: Sequence[Tensor] = ()) -> None:
        """Take part in one round; whoever ends with an error is left behind by the others, as a scheduler orders."""
        rounds = Rounds(self, Buffers(nn.Linear(1, 1)))  # type: ignore[arg-type]
        try:
            opened = rounds.open(num_leaves, [(gradient,) for gradient in gradients], gradients)
            for bucket in range(len(gradients)):
                opened.exchange.push(bucket)
            opened.finish(header, next_iteration=0)
        except Abandoned:
            raise
        except BaseException:
            self.group.kill(self.worker)
            for other in set(MEMBERS) - {self.worker}:
                self.group.nodes[other].poller.abort_round(self.worker, "it has ended", generation=GENERATION)
            raise


def hold(group: Group, *, sender: int, receiver: int, until: threading.Event) -> None:
    """Let nothing through from ``sender`` to ``receiver`` until the event; it is sent by the sender's next step."""
    link = group.nodes[sender].poller.links[receiver]
    flush = link.flush

    def held() -> None:
        if until.is_set():
            flush()

    link.flush = held  # type: ignore[method-assign]


@pytest.mark.parametrize("held_round", [0, 1])
@pytest.mark.parametrize(("first", "sender", "late"), list(itertools.permutations(MEMBERS)))
def test_all_members_learn_that_they_differ_before_one_of_them_ends(
    connect_group: Callable[[int], Group], first: int, sender: int, late: int, held_round: int
) -> None:
    """The header of ``sender`` reaches ``late`` when ``first`` has done all it can do without that."""
    group = connect_group(len(MEMBERS))
    members = [Member(group, worker) for worker in MEMBERS]
    released = threading.Event()

    def release(_: object = None) -> None:
        released.set()
        group.nodes[sender].poller.wake()

    def on_first(round_: int) -> None:
        if round_ > held_round:
            release()

    def on_sender(round_: int) -> None:
        if round_ == held_round:
            hold(group, sender=sender, receiver=late, until=released)

    members[first].on_begin, members[sender].on_begin = on_first, on_sender
    calls: list[Future[None]] = [
        start(lambda member=member: member.run(DIFFERENT if member.worker == 1 else COMMON)) for member in members
    ]
    calls[first].add_done_callback(release)
    for call in calls:
        error = call.exception(PATIENCE_SECONDS)
        assert isinstance(error, MembersDiffer), error
        assert "the parameters of worker 1 differ" in str(error)


def test_a_metric_that_only_some_members_give_is_named_with_its_shards(connect_group: Callable[[int], Group]) -> None:
    group = connect_group(len(MEMBERS))

    def header(*names: str) -> RoundHeader:
        return replace(COMPUTED, computed=ComputedShards(partials=(PartialSums(dict.fromkeys(names, 1.0)),)))

    headers = header("loss"), header("loss"), header("loss", "accuracy")
    calls = [start(partial(Member(group, worker).run, headers[worker], num_leaves=3)) for worker in MEMBERS]
    for call in calls:
        error = call.exception(PATIENCE_SECONDS)
        assert isinstance(error, MembersDiffer), error
        assert "the metric accuracy was given for shard 2 and not for shards 0, 1 of a global batch" in str(error)


def test_members_whose_operations_have_no_deterministic_form_may_differ_by_rounding(
    connect_group: Callable[[int], Group],
) -> None:
    """In the loss of the first shard, and in a score that a part of the script's state remembers."""
    group = connect_group(len(MEMBERS))

    def header(worker: int, *, operations: tuple[str, ...]) -> RoundHeader:
        shard = ShardFingerprint("batch", f"loss {worker}", f"gradients {worker}")
        computed = COMPUTED.computed._replace(operations=operations, first_shard=shard)
        return replace(COMMON, computed=computed, facts={f"{PART}best": f"score {worker}"})

    def run(members: Sequence[Member], *, operations: tuple[str, ...]) -> list[BaseException | None]:
        calls = [
            start(partial(each.run, header(each.worker, operations=operations if each.worker else ()), num_leaves=3))
            for each in members
        ]
        return [call.exception(PATIENCE_SECONDS) for call in calls]

    assert run([Member(group, worker) for worker in MEMBERS], operations=("ctc_loss",)) == [None] * len(MEMBERS)
    for error in run([Member(group, worker) for worker in MEMBERS], operations=()):
        assert isinstance(error, MembersDiffer), error
        assert 'another "best" (a part of state={...}) than the others at the same iteration' in str(error)


def test_members_that_differ_do_not_wait_for_one_that_is_lost(connect_group: Callable[[int], Group]) -> None:
    group = connect_group(len(MEMBERS))
    members = [Member(group, worker) for worker in MEMBERS]

    all_know = threading.Barrier(len(MEMBERS))

    def on_begin(round_: int, *, dies: bool) -> None:
        if round_ == 1:
            all_know.wait(PATIENCE_SECONDS)
            if dies:
                raise SystemExit

    for member in members:
        member.on_begin = partial(on_begin, dies=member.worker == 0)
    calls = [start(lambda member=member: member.run(DIFFERENT if member.worker == 1 else COMMON)) for member in members]
    assert isinstance(calls[0].exception(PATIENCE_SECONDS), SystemExit)
    assert all(isinstance(call.exception(PATIENCE_SECONDS), MembersDiffer) for call in calls[1:])


def test_a_member_that_ends_training_while_the_others_compute_gradients_is_named_and_left_behind(
    connect_group: Callable[[int], Group],
) -> None:
    group = connect_group(len(MEMBERS))
    ends, *trainers = (Member(group, worker) for worker in (1, 0, 2))
    calls = [start(partial(member.run, COMPUTED, num_leaves=3, gradients=(torch.ones(4),))) for member in trainers]
    alone = start(partial(ends.run, COMMON)).exception(PATIENCE_SECONDS)
    assert isinstance(alone, OtherRound)
    assert "the workers did not end training" in str(alone)
    for call in calls:
        lost = call.exception(PATIENCE_SECONDS)
        assert isinstance(lost, Abandoned)
        assert lost.suspect == 1


def test_no_result_comes_of_a_round_in_which_members_compute_different_things(
    connect_group: Callable[[int], Group],
) -> None:
    """Who notices it first ends, and the others lose it."""
    group = connect_group(len(MEMBERS))
    calls = [
        start(partial(Member(group, worker).run, COMMON if worker == 1 else COMPUTED, num_leaves=int(worker != 1) * 3))
        for worker in MEMBERS
    ]
    errors = [call.exception(PATIENCE_SECONDS) for call in calls]
    assert all(isinstance(error, OtherRound | Abandoned) for error in errors), errors
    assert any(isinstance(error, OtherRound) for error in errors), errors


def test_a_member_that_names_a_generation_without_itself_sends_its_header_last(
    connect_group: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the others do not write to memory that it may still read: see `LinkRound.finish`."""
    group = connect_group(len(MEMBERS))
    members = [Member(group, worker) for worker in MEMBERS]
    members[1].trains_on = False
    finish = LinkRound.finish
    may_leave: dict[int, bool] = {}

    def recorded(self: LinkRound, header: bytes, **options: bool) -> tuple[bytes, ...]:
        may_leave[self.rank] = options["may_leave"]
        return finish(self, header, **options)

    monkeypatch.setattr(LinkRound, "finish", recorded)
    wait([start(lambda member=member: member.run(COMMON)) for member in members])  # type: ignore[misc]
    assert may_leave == {rank: rank == 1 for rank in range(len(MEMBERS))}
