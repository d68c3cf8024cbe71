"""Members share the work of a checkpoint, and agree by their headers alone on what is stored and what is missing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from resile_learner.checkpoint.checkpoint_header import NOTHING, CheckpointHeader, PauseProgress
from resile_learner.checkpoint.checkpointer import Checkpointer, StorageGone
from resile_learner.checkpoint.manifest import CheckpointId, DivergedError
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.checkpoint.store import CheckpointStore
from resile_learner.checkpoint.upload_queue import Task, UploadQueue, Wait
from resile_learner.checkpoint.uploads import carry_out
from resile_learner.session import SoloSession, View
from resile_learner.state.flat import allocate
from resile_learner.state.run import RunState
from resile_learner.training.script_state import State
from resile_shared.errors import ResileError
from resile_shared.storage.objects import ObjectStorage, StorageError

from .test_checkpointer import StoredSession, state_of

FAILURE = StorageError("store an object", "it cannot be reached", "wait")


class Members:
    """The members of a generation in simulated time. They store something only in ``upload``."""

    def __init__(self, folder: Path, num: int) -> None:
        self.now = 100.0
        self.generation = 1
        self.objects = ObjectStorage(folder.as_uri())
        self.store = CheckpointStore(folder.as_uri())
        self.sessions: dict[int, StoredSession] = {}
        self.queues: dict[int, UploadQueue] = {}
        self.parts: dict[int, Checkpointer] = {}
        for me in range(num):
            self.add(me)
        self.form(*range(num))

    def __iter__(self) -> Any:
        return iter(self.sessions.items())

    def add(self, me: int) -> None:
        """Start a worker that knows of no checkpoint."""
        self.sessions[me] = StoredSession(self.objects.url)
        self.queues[me] = UploadQueue()
        self.parts[me] = Checkpointer(self.sessions[me], every=None, clock=self.clock, uploads=self.uploads(me))

    def clock(self) -> float:
        return self.now

    def uploads(self, me: int) -> Any:
        return lambda _: self.queues[me]

    def form(self, *workers: int) -> None:
        for me, session in self:
            session.view = View(self.generation, workers, me)  # type: ignore[misc]
        self.workers = workers

    def recover(self, *workers: int, behind: tuple[int, ...] = (), joining: tuple[int, ...] = ()) -> None:
        """``workers`` go on without the others; those that are ``behind`` received the state of another.

        Those that are ``joining`` become members, too.
        """
        self.generation += 1
        self.form(*workers, *joining)
        for me in workers:
            self.parts[me].recovered(is_behind=me in behind)

    def begin(self, iteration: int, states: Mapping[int, RunState] | None = None) -> None:
        """Begin a checkpoint; ``states`` are those of members that differ from the others."""
        state = state_of(float(iteration))
        for me in self.workers:
            self.parts[me].begin(iteration, (states or {}).get(me, state))

    def round(self, *, paused_at: int | None = None) -> list[CheckpointHeader]:
        """Commit a round."""
        headers = [self.parts[me].header_fields(paused_at=paused_at) for me in self.workers]
        for me in self.workers:
            self.parts[me].on_headers(headers)
        return headers

    def upload(self, me: int, *, failure: ResileError | None = None) -> list[Task]:
        """Carry out what a member has to do, or have it fail; return what that was."""
        tasks = []
        while not isinstance(task := self.queues[me].take(now=self.now), Wait):
            tasks.append(task)
            result = failure or carry_out(task, self.store, job="job-1", keep=2)
            self.queues[me].done(task, result, now=self.now)
        return tasks

    def saved(self, me: int) -> list[tuple[int, int, bool]]:
        """What a member has reported to be saved: in which generation, of which iteration, and if for a pause."""
        return [(report.generation, report.iteration, report.pausing) for report in self.sessions[me].saved]


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Members:
    monkeypatch.setitem(Snapshot.__init__.__kwdefaults__, "part_bytes", 8)  # type: ignore[arg-type]
    return Members(tmp_path, 3)


def test_members_divide_the_parts_and_the_lowest_writes_the_manifest_and_reports_it(members: Members) -> None:
    members.begin(5)
    shares = [len(members.upload(me)) for me in range(3)]
    assert shares == [1, 1, 1], "the skeleton, and two parts of the tensors"
    assert members.store.complete() == []
    members.round()
    assert [len(members.upload(me)) for me in range(3)] == [2, 0, 0], "the manifest, and then old ones are deleted"
    assert members.store.complete() == [CheckpointId(1, 5, 1)]
    assert all(part.is_busy for part in members.parts.values()), "the others do not know yet"
    members.round()
    assert not any(part.is_busy for part in members.parts.values())
    assert [members.saved(me) for me in range(3)] == [[(1, 5, False)], [], []]


class Times(State):
    may_differ = True


def timed(text: str) -> RunState:
    """The state of a member with a plain value of its own."""
    return RunState(state_of(5.0)._model, {}, {"timer": Times(text=text)}, after_load=lambda: None)


def states(*texts: str) -> dict[int, RunState]:
    return {me: timed(text) for me, text in enumerate(texts)}


def load(members: Members) -> RunState:
    loaded, skipped = members.store.load_newest(allocate)
    assert loaded is not None
    assert not skipped
    state = timed("")
    state.load(loaded.skeleton, loaded.tensors)
    return state


def test_what_may_differ_is_that_of_the_member_which_stored_it_first(members: Members) -> None:
    members.begin(5, states("a", "b" * 300, ""))
    finish(members)
    assert load(members)._extras["timer"] == Times(text="a")


def test_a_lost_member_may_store_what_differs_late(members: Members) -> None:
    members.begin(5, states("a", "b" * 300, ""))
    late = members.queues[0].take(now=members.now)
    assert late[1:] == (0,)
    members.upload(1)
    members.upload(2)
    members.recover(1, 2)
    finish(members)
    carry_out(late, members.store, job="job-1", keep=2)
    assert load(members)._extras["timer"] == Times(text="b" * 300)


def test_the_values_of_a_member_that_stored_them_and_was_lost_are_kept(members: Members) -> None:
    members.begin(5, states("a", "b" * 300, ""))
    members.upload(0)
    members.recover(1, 2)
    finish(members)
    assert load(members)._extras["timer"] == Times(text="a")


def test_no_other_part_of_the_skeleton_may_differ(members: Members) -> None:
    differing = states("a", "b", "c")
    differing[0].progress.epoch = 1
    members.begin(5, differing)
    members.upload(0)
    members.round()
    members.recover(1, 2)
    with pytest.raises(DivergedError, match="members have different bytes in part 0"):
        finish(members)
    assert members.store.complete() == []


def test_the_parts_of_a_lost_member_are_stored_by_those_that_have_a_snapshot(members: Members) -> None:
    members.begin(5)
    members.upload(2)
    members.recover(1, 2, behind=(1,))
    members.round()
    assert members.upload(1) == [], "it has the state of another, and no snapshot"
    assert members.upload(2)
    members.round()
    members.upload(2)
    assert members.store.complete() == [CheckpointId(1, 5, 1)]
    members.round()
    assert [members.saved(me) for me in range(3)] == [[], [], [(2, 5, False)]]


def test_a_recovery_repeats_the_reports_that_only_some_members_received(members: Members) -> None:
    members.begin(5)
    for me in range(3):
        members.upload(me)
    headers = [members.parts[me].header_fields() for me in range(3)]
    members.parts[2].on_headers(headers)
    members.recover(1, 2)
    members.round()
    assert [len(members.upload(me)) for me in (1, 2)] == [2, 0], "all parts are known to be stored: only the manifest"
    members.round()
    assert members.store.complete() == [CheckpointId(1, 5, 1)]


def test_what_is_reported_in_a_round_that_nobody_commits_is_reported_in_the_next_one(members: Members) -> None:
    def repeat_round() -> None:
        for me in range(3):
            members.parts[me].header_fields()

    members.begin(5)
    for me in range(3):
        members.upload(me)
    repeat_round()
    members.round()
    assert [len(members.upload(me)) for me in range(3)] == [2, 0, 0], "all parts are known to be stored"
    repeat_round()
    members.round()
    assert not any(part.is_busy for part in members.parts.values())


def test_a_checkpoint_that_waits_is_replaced_by_a_newer_one_everywhere(members: Members) -> None:
    for iteration in (5, 6, 7):
        members.begin(iteration)
    dropped = [list(header.dropped) for header in members.round()]
    assert dropped == [["lineage-1/000000000006-g1"]] * 3
    assert members.round() == [CheckpointHeader(is_busy=True)] * 3, "what was received is not reported again"
    for _ in range(6):
        for me in range(3):
            members.upload(me)
        members.round()
    assert members.store.complete() == [CheckpointId(1, 7, 1), CheckpointId(1, 5, 1)]


def test_what_some_members_replace_is_given_up_by_one_that_had_begun_to_store_it(members: Members) -> None:
    """It had been behind, and stored nothing. Else it would wait for a checkpoint that nobody completes."""
    for iteration in (5, 6):
        members.begin(iteration)
    members.recover(0, 1, behind=(1,))
    members.round()
    for iteration in (7, 8):
        members.begin(iteration)
    assert members.queues[1].current == CheckpointId(1, 7, 2)
    members.round()
    assert members.queues[1].current == CheckpointId(1, 8, 2)
    finish(members)
    finish(members)
    assert members.store.complete() == [CheckpointId(1, 8, 2), CheckpointId(1, 5, 1)]
    assert not any(members.parts[me].is_busy for me in members.workers)


def test_a_checkpoint_of_one_boundary_is_begun_once(members: Members) -> None:
    for iteration in (5, 5, 6):
        members.begin(iteration)
    assert members.round()[0].dropped == (), "6 waits for 5, and replaces nothing"
    finish(members)
    finish(members)
    assert members.store.complete() == [CheckpointId(1, 6, 1), CheckpointId(1, 5, 1)]


def test_a_member_may_be_behind_before_there_was_a_checkpoint(members: Members) -> None:
    members.recover(1, 2, behind=(1,))
    assert [header.held for header in members.round()] == [[], []]
    members.begin(5)
    finish(members)
    assert members.store.complete() == [CheckpointId(1, 5, 2)]


def test_a_worker_that_a_recovery_makes_a_member_has_no_share_of_what_was_begun_before(members: Members) -> None:
    """It has no snapshot: a joiner that the state was not handed to yet has never heard of the checkpoint."""
    members.begin(5)
    members.add(3)
    members.recover(1, 2, joining=(3,))
    assert [header.held for header in members.round()] == [["lineage-1/000000000005-g1"]] * 2 + [None]
    assert members.upload(3) == []
    finish(members)
    assert members.store.complete() == [CheckpointId(1, 5, 1)]


def test_a_closed_member_stores_nothing_more(members: Members) -> None:
    members.begin(5)
    members.parts[1].close()
    assert members.upload(1) == []
    assert members.queues[1].has_ended


def test_a_header_says_whether_a_checkpoint_is_due_after_its_iteration(tmp_path: Path) -> None:
    checkpointer = Checkpointer(StoredSession(tmp_path.as_uri()), every=5)
    assert [checkpointer.header_fields(iteration).is_due for iteration in (4, 5, 6, 10)] == [False, True, False, True]
    assert not checkpointer.header_fields().is_due, "its round does not train"


def test_the_time_to_the_next_checkpoint_is_measured_from_the_last_one(tmp_path: Path) -> None:
    now = 0.0
    session, queue = StoredSession(tmp_path.as_uri()), UploadQueue()
    checkpointer = Checkpointer(session, every="10 s", clock=lambda: now, uploads=lambda _: queue)
    now = 12.0
    assert checkpointer.header_fields(1).is_due
    checkpointer.begin(1, state_of(1.0))
    now = 21.9
    assert not checkpointer.header_fields(2).is_due
    now = 22.0
    assert checkpointer.header_fields(2).is_due


def test_members_that_differ_stop_with_what_is_wrong(members: Members) -> None:
    members.begin(5)
    wrong = ResileError("members have different bytes")
    members.upload(1, failure=wrong)
    with pytest.raises(ResileError, match="different bytes"):
        members.parts[1].on_headers([NOTHING] * 3)


def test_a_pause_takes_one_checkpoint_of_its_iteration(members: Members) -> None:
    members.begin(5)
    finish(members)
    headers = members.round(paused_at=8)
    assert [header.pause for header in headers] == [PauseProgress.UNKNOWN] * 3, "that of iteration 5 is another one"
    assert members.parts[0].is_due(headers)
    members.begin(8)
    headers = members.round(paused_at=8)
    assert [header.pause for header in headers] == [PauseProgress.STORING] * 3
    assert not members.parts[0].is_due(headers)
    finish(members, paused_at=8)
    headers = members.round(paused_at=8)
    assert [header.pause for header in headers] == [PauseProgress.STORED] * 3
    assert not members.parts[0].is_due(headers)


def test_a_checkpoint_is_due_in_a_pause_only_if_nobody_has_its_state(members: Members) -> None:
    unknown, storing = (CheckpointHeader(pause=progress) for progress in (PauseProgress.UNKNOWN, PauseProgress.STORING))
    is_due = members.parts[1].is_due
    assert is_due([unknown, unknown])
    assert not is_due([unknown, storing])
    assert not is_due([NOTHING, NOTHING])
    assert is_due([CheckpointHeader(is_due=True), NOTHING])
    assert not is_due([NOTHING, CheckpointHeader(is_due=True)]), "the lowest rank decides"


def finish(members: Members, *, paused_at: int | None = None) -> None:
    """Have all of the current checkpoint stored and known."""
    for _ in range(3):
        for me in members.workers:
            members.upload(me)
        members.round(paused_at=paused_at)


def test_a_pause_is_reported_once_a_second_by_the_lowest_member_that_knows(members: Members) -> None:
    members.round(paused_at=8)
    members.begin(8)
    finish(members, paused_at=8)
    assert [members.saved(me) for me in range(3)] == [[(1, 8, True)], [], []]
    members.now += 0.9
    members.round(paused_at=8)
    assert len(members.saved(0)) == 1
    members.now += 0.1
    members.round(paused_at=8)
    assert members.saved(0) == [(1, 8, True)] * 2
    members.recover(1, 2)
    members.round(paused_at=8)
    assert [members.saved(me) for me in (1, 2)] == [[(2, 8, True)], []], "as a member of the generation that pauses now"


def test_without_storage_there_are_no_checkpoints() -> None:
    checkpointer = Checkpointer(SoloSession(), every=1)
    checkpointer.begin(1, state_of(1.0))
    assert checkpointer.header_fields(2) is NOTHING
    checkpointer.store_model(state_of(1.0)._model)  # type: ignore[arg-type]
    assert not checkpointer.is_busy
    assert not checkpointer.is_failing
    assert checkpointer.model_key is None
    checkpointer.close()


def test_the_lowest_rank_alone_stores_the_final_model_once(members: Members) -> None:
    for _ in range(2):
        for me in range(3):
            members.parts[me].store_model(state_of(1.0)._model)  # type: ignore[arg-type]
    assert [members.parts[me].is_busy for me in range(3)] == [True, False, False]
    assert [len(members.upload(me)) for me in range(3)] == [1, 0, 0]
    assert sorted(members.objects.sizes("models/")) == ["models/lineage-1.pt", members.parts[2].model_key]
    members.parts[0].store_model(state_of(1.0)._model)  # type: ignore[arg-type]
    assert members.upload(0) == []
    assert not members.parts[0].is_busy


def test_the_end_of_a_job_waits_for_its_storage_as_long_as_it_trained_since_its_last_checkpoint(
    members: Members,
) -> None:
    def store_model() -> None:
        members.parts[0].store_model(state_of(1.0)._model)  # type: ignore[arg-type]

    members.now += 5000.0
    members.begin(5)
    members.now += 10.0
    finish(members)
    members.now += 990.0
    store_model()
    members.upload(0, failure=FAILURE)
    members.now += 1000.0
    store_model()
    members.now += 0.1
    with pytest.raises(StorageGone, match="within 17 minutes"):
        store_model()


def test_a_warning_says_once_what_is_not_stored_and_whether_training_goes_on(members: Members) -> None:
    def warning(*, paused_at: int | None = None) -> str:
        before = len(members.sessions[0].warnings)
        for _ in range(2):
            members.now += 60.0
            members.upload(0, failure=FAILURE)
            members.round(paused_at=paused_at)
        assert [members.parts[me].is_failing for me in (0, 1)] == [True, False]
        assert not members.sessions[1].warnings, "it stores what it has to"
        (new,) = members.sessions[0].warnings[before:]
        return new

    members.begin(5)
    text = warning()
    assert text.startswith("checkpoint lineage-1/000000000005-g1 is not stored yet in file:///")
    assert text.endswith(": it cannot be reached; wait (training continues)")
    assert warning(paused_at=5).endswith("(training has ended, and the job is waiting for it)")
    members.now += 60.0
    finish(members)
    members.parts[0].store_model(state_of(1.0)._model)  # type: ignore[arg-type]
    text = warning()
    assert text.startswith("the final model is not stored yet in file:///")
    assert text.endswith("(training has ended, and the job is waiting for it)")
