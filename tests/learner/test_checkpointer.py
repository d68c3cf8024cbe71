"""How one member behaves towards a storage that fails: it warns, waits, and gives up late."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

from resile_learner.checkpoint import checkpointer as module
from resile_learner.checkpoint.checkpoint_header import NOTHING, CheckpointHeader, StoredPart
from resile_learner.checkpoint.checkpointer import Checkpointer, StorageGone
from resile_learner.checkpoint.manifest import PartInfo
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.checkpoint.upload_queue import PutPart, UploadQueue, Wait, WriteManifest
from resile_learner.messages import ChangeTraced, CheckpointSaved, Message, Warned
from resile_learner.session import SoloSession, View
from resile_learner.state.run import RunState
from resile_shared.messages.allocations import StoredCheckpoint
from resile_shared.version import VERSION


class StoredSession(SoloSession):
    """A plain run that has storage, and what it reports."""

    def __init__(self, storage: str, *, lineage: int = 1, known: int | None = None) -> None:
        super().__init__()
        self.stored_checkpoint = None if known is None else StoredCheckpoint(lineage=1, iteration=known)  # type: ignore[assignment]
        self.view = View(generation=lineage, workers=(0,), me=0, lineage=lineage)  # type: ignore[misc]
        self.storage = storage  # type: ignore[assignment]
        self.warnings: list[str] = []
        self.saved: list[CheckpointSaved] = []

    def report(self, message: Message) -> None:
        match message:
            case Warned(message=text):
                self.warnings.append(text)
            case CheckpointSaved():
                self.saved.append(message)
            case ChangeTraced(change="checkpoint", spans=spans):
                assert [span.name for span in spans] == ["checkpoint", "copy state", "store parts", "write manifest"]
                assert all(spans[0].begin <= span.begin <= span.end <= spans[0].end for span in spans)
            case _:
                raise AssertionError(message)


@pytest.fixture
def session(tmp_path: Path) -> StoredSession:
    return StoredSession(tmp_path.as_uri())


@pytest.fixture
def checkpointer(session: StoredSession) -> Iterator[Checkpointer]:
    checkpointer = Checkpointer(session, every=None)
    yield checkpointer
    checkpointer.close()


def until(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came")


def in_the_way(folder: Path, name: str) -> Path:
    """Something that keeps an object from being written, for root as well."""
    obstacle = folder / name
    obstacle.mkdir(parents=True)
    (obstacle / "file").touch()
    return obstacle


def remove(obstacle: Path) -> None:
    (obstacle / "file").unlink()
    obstacle.rmdir()


def state_of(weight: float) -> RunState:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, weight)
    nn.init.zeros_(model.bias)
    return RunState(model, {}, {}, after_load=lambda: None)


def weight_of(state: RunState) -> float:
    return float(state._model.weight[0, 0].detach())  # type: ignore[union-attr, index]


def store_checkpoint(folder: Path, iteration: int, weight: float, *, pausing: bool = False) -> Path:
    """Store a checkpoint of lineage 1; return the file of its tensors."""
    checkpointer = Checkpointer(StoredSession(folder.as_uri()), every=None)
    state = state_of(weight)
    state.progress.iteration, state.progress.pausing = iteration, pausing
    checkpointer.begin(iteration, state)
    for _ in range(3000):
        checkpointer.on_headers([checkpointer.header_fields()])
        if not checkpointer.is_busy:
            break
        threading.Event().wait(0.01)
    checkpointer.close()
    return folder / "checkpoints" / "lineage-1" / f"{iteration:012d}-g1" / "part-00001"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_start_that_finds_no_checkpoint_keeps_the_state_of_the_script_and_says_so(tmp_path: Path) -> None:
    session = StoredSession(tmp_path.as_uri(), lineage=2)
    state = state_of(5.0)
    assert not Checkpointer(session, every=None).resume(state)
    assert weight_of(state) == 5.0
    assert session.warnings == [
        f"there is no complete checkpoint in {tmp_path.as_uri()}: training starts over from the beginning"
    ]


@pytest.mark.parametrize("older", [None, 3])
def test_a_start_that_misses_a_checkpoint_which_was_reported_waits_for_the_storage(
    tmp_path: Path, older: int | None
) -> None:
    store, away, state = tmp_path / "store", tmp_path / "away", state_of(5.0)
    store_checkpoint(store, 6, 2.0)
    store.rename(away)
    if older:
        store_checkpoint(store, older, 1.0)

    def mount(_: float) -> None:
        assert weight_of(state) == 5.0
        shutil.rmtree(store, ignore_errors=True)
        away.rename(store)

    session = StoredSession(store.as_uri(), lineage=2, known=6)
    assert Checkpointer(session, every=None, sleep=mount).resume(state)
    assert (state.progress.iteration, weight_of(state)) == (6, 2.0)
    newest = "the newest one there is lineage-1/000000000003-g1" if older else "there is none that is whole"
    (warning,) = session.warnings
    assert warning == (
        "the job is waiting for its checkpoint: the job has stored a checkpoint of iteration 6 in "
        f"{store.as_uri()}, but {newest}: make the storage available as it was, or start the job anew"
    )


def test_a_start_that_finds_a_part_of_what_was_stored_waits_for_the_rest(tmp_path: Path) -> None:
    """As after a file system was unmounted while a checkpoint was being stored."""
    store, away, state = tmp_path / "store", tmp_path / "away", state_of(5.0)
    store_checkpoint(store, 6, 2.0)
    shutil.copytree(store, away)
    for part in store.rglob("part-*"):
        part.unlink()

    def mount(_: float) -> None:
        shutil.copytree(away, store, dirs_exist_ok=True)

    session = StoredSession(store.as_uri(), lineage=2, known=6)
    assert Checkpointer(session, every=None, sleep=mount).resume(state)
    assert (state.progress.iteration, weight_of(state)) == (6, 2.0)
    (warning,) = session.warnings
    assert "but there is none that is whole: make the storage available" in warning


def test_a_start_does_not_wait_for_a_reported_checkpoint_that_is_damaged_or_was_replaced(tmp_path: Path) -> None:
    flip(store_checkpoint(tmp_path, 6, 2.0))
    store_checkpoint(tmp_path, 3, 1.0)
    state = state_of(5.0)
    assert Checkpointer(StoredSession(tmp_path.as_uri(), lineage=2, known=6), every=None).resume(state)
    assert weight_of(state) == 1.0
    newer = tmp_path / "newer"
    store_checkpoint(newer, 9, 3.0)
    assert Checkpointer(StoredSession(newer.as_uri(), lineage=2, known=7), every=None).resume(state)


@pytest.mark.parametrize("name", ["000000000006-g1/manifest.json", "start.json"])
def test_what_another_version_has_stored_is_named_and_kept_and_never_taken_for_damage(
    tmp_path: Path, name: str
) -> None:
    store_checkpoint(tmp_path, 3, 1.0)
    store_checkpoint(tmp_path, 6, 2.0)
    assert Checkpointer(StoredSession(tmp_path.as_uri(), lineage=2), every=None).resume(state_of(5.0))
    lineage, own = (2, 1) if name == "start.json" else (1, 2)
    file = tmp_path / "checkpoints" / f"lineage-{lineage}" / name
    before = file.read_text()
    document = {**json.loads(before), "format": 3, "field": "of a later version"}
    file.write_text(json.dumps(document))
    session, state = StoredSession(tmp_path.as_uri(), lineage=2 if name == "start.json" else 3), state_of(5.0)

    def upgrade(_: float) -> None:
        assert json.loads(file.read_text()) == document
        file.write_text(before)

    assert Checkpointer(session, every=None, sleep=upgrade).resume(state)
    assert (state.progress.iteration, weight_of(state)) == (6, 2.0)
    (warning,) = session.warnings
    key = f"checkpoints/lineage-{lineage}/{name}"
    assert warning == (
        f"the job is waiting for its checkpoint: {key} has format 3, and Resile {VERSION} reads format {own}: use the "
        "version of Resile that stored it, or start the job anew"
    )


@pytest.mark.parametrize("known", [None, 6])
def test_a_start_that_finds_only_damaged_checkpoints_keeps_the_state_of_the_script_and_says_so(
    tmp_path: Path, known: int | None
) -> None:
    """Whether or not one of them was reported as stored: waiting would not make it whole."""
    for iteration in (3, 6):
        flip(store_checkpoint(tmp_path, iteration, 1.0))
    session = StoredSession(tmp_path.as_uri(), lineage=2, known=known)
    state = state_of(5.0)
    assert not Checkpointer(session, every=None).resume(state)
    assert weight_of(state) == 5.0
    (warning,) = session.warnings
    assert "is damaged (lineage-1/000000000006-g1: the checksum of part 1 is wrong; lineage-1/" in warning


def test_a_job_that_starts_again_from_the_checkpoint_of_a_pause_is_not_paused(tmp_path: Path) -> None:
    store_checkpoint(tmp_path, 3, 1.0, pausing=True)
    state = state_of(5.0)
    assert Checkpointer(StoredSession(tmp_path.as_uri(), lineage=2), every=None).resume(state)
    assert weight_of(state) == 1.0
    assert not state.progress.pausing


def test_a_member_waits_for_the_checkpoint_that_another_decided_on(tmp_path: Path) -> None:
    store_checkpoint(tmp_path, 3, 1.0)
    part = store_checkpoint(tmp_path, 6, 2.0)
    first, second = (StoredSession(tmp_path.as_uri(), lineage=2) for _ in range(2))
    state = state_of(5.0)
    assert Checkpointer(first, every=None).resume(state)
    assert (state.progress.iteration, weight_of(state)) == (6, 2.0)
    flip(part)
    assert Checkpointer(second, every=None, sleep=lambda _: flip(part)).resume(state)
    assert (state.progress.iteration, weight_of(state)) == (6, 2.0)
    (warning,) = second.warnings
    assert warning.startswith("the job is waiting for its checkpoint: checkpoint lineage-1/000000000006-g1 is damaged")


def test_the_final_model_is_waited_for_and_the_user_warned_once(
    tmp_path: Path, session: StoredSession, checkpointer: Checkpointer
) -> None:
    obstacle = in_the_way(tmp_path, "models/lineage-1.safetensors")
    model = nn.Linear(2, 2)
    checkpointer.store_model(model)
    until(lambda: checkpointer.is_failing)
    for _ in range(3):
        checkpointer.on_headers([])
        checkpointer.store_model(model)
        assert checkpointer.is_busy
    (warning,) = session.warnings
    assert f"the final model is not stored yet in {tmp_path.as_uri()}: " in warning
    assert "the job is waiting for it" in warning
    remove(obstacle)
    until(lambda: not checkpointer.is_busy)
    assert (tmp_path / "models/lineage-1.safetensors").is_file()


def test_each_lineage_stores_a_final_model_of_its_own(tmp_path: Path) -> None:
    """Members that were cut off may complete too: they do not replace the model that the job's completion names."""
    for lineage, weight in ((2, 2.0), (1, 1.0)):
        checkpointer = Checkpointer(StoredSession(tmp_path.as_uri(), lineage=lineage), every=None)
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, weight)
        checkpointer.store_model(model)
        until(lambda checkpointer=checkpointer: not checkpointer.is_busy)
        checkpointer.close()
    weights = [load_file(tmp_path / f"models/lineage-{lineage}.safetensors")["weight"].item() for lineage in (1, 2)]
    assert weights == [1.0, 2.0]


def test_the_wait_for_the_final_model_has_an_end(
    tmp_path: Path, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(tmp_path, "models/lineage-1.safetensors")
    model = nn.Linear(2, 2)
    checkpointer.store_model(model)
    until(lambda: checkpointer.is_failing)
    checkpointer.store_model(model)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    checkpointer._safe_since = float("inf")
    with pytest.raises(StorageGone, match=r"training is complete, but its result could not be stored .* resume from"):
        checkpointer.store_model(model)


def test_training_continues_with_a_warning_while_a_checkpoint_cannot_be_stored(
    tmp_path: Path, session: StoredSession, checkpointer: Checkpointer
) -> None:
    obstacle = in_the_way(tmp_path, "checkpoints/lineage-1/000000000003-g1/part-00000")
    checkpointer.begin(3, RunState(nn.Linear(3, 1), {}, {}, after_load=lambda: None))
    until(lambda: checkpointer.is_failing)
    checkpointer.on_headers([])
    (warning,) = session.warnings
    assert "checkpoint lineage-1/000000000003-g1 is not stored yet" in warning
    assert "(training continues)" in warning
    remove(obstacle)
    until(lambda: checkpointer.header_fields().stored)


@pytest.fixture
def one_of_two(session: StoredSession, monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpointer, UploadQueue]:
    """The lower of two members, which have just begun a checkpoint of two parts, and what it stores."""
    monkeypatch.setitem(Snapshot.__init__.__kwdefaults__, "part_bytes", 400)  # type: ignore[arg-type]
    session.view = View(generation=1, workers=(0, 1), me=0, lineage=1)  # type: ignore[misc]
    queue = UploadQueue()
    checkpointer = Checkpointer(session, every=None, uploads=lambda _: queue)
    checkpointer.begin(5, state_of(1.0))
    return checkpointer, queue


def test_the_manifest_waits_for_the_last_part_whichever_member_stores_it(
    one_of_two: tuple[Checkpointer, UploadQueue],
) -> None:
    checkpointer, queue = one_of_two
    mine, other = (PartInfo(number=number, num_bytes=1, sha256="0" * 64) for number in (0, 1))
    task = queue.take(now=0.0)
    assert isinstance(task, PutPart)
    queue.done(task, mine, now=0.0)
    header = checkpointer.header_fields()
    assert [stored.part for stored in header.stored] == [mine]
    checkpointer.on_headers([header, NOTHING])
    assert isinstance(queue.take(now=0.0), Wait)
    stored = StoredPart(task.upload.checkpoint.name, other)
    checkpointer.on_headers([checkpointer.header_fields(), CheckpointHeader(stored=[stored])])
    assert queue.take(now=0.0) == WriteManifest(task.upload, (mine, other))


def test_a_member_that_is_behind_gives_up_its_share_of_a_checkpoint(
    one_of_two: tuple[Checkpointer, UploadQueue],
) -> None:
    """It may have missed the start of it, or the end: the others store all of it."""
    checkpointer, queue = one_of_two
    checkpointer.recovered(is_behind=True)
    assert queue.current is None
    assert checkpointer.header_fields().held == []
