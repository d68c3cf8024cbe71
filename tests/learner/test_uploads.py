"""The upload threads store what is assigned to them, and report what is stored and what failed."""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from resile_learner.checkpoint.manifest import CheckpointId, PartInfo, PartTracker
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.checkpoint.store import CheckpointStore
from resile_learner.checkpoint.uploads import Uploads
from resile_learner.state.flat import allocate, flatten, unflatten
from resile_shared.storage.objects import StorageError

T = TypeVar("T")
FIRST, SECOND, THIRD = CheckpointId(1, 1, 1), CheckpointId(1, 2, 1), CheckpointId(1, 3, 1)


class GatedStore(CheckpointStore):
    """The real store, which stores a part only when the gate is open."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failure: Exception | None = None

    def put_part(self, name: str, number: int, buffers: Sequence[memoryview]) -> PartInfo:
        self.entered.set()
        assert self.gate.wait(30)
        if self.failure:
            raise self.failure
        return super().put_part(name, number, buffers)


def snapshot(value: float = 1.0) -> Snapshot:
    return Snapshot(flatten({"w": torch.full((100,), value)}), part_bytes=100)


def until(probe: Callable[[], T]) -> T:
    """Ask until the answer is not empty."""
    for _ in range(3000):
        if answer := probe():
            return answer
        threading.Event().wait(0.01)
    raise AssertionError("nothing came")


@pytest.fixture
def store(tmp_path: Path) -> GatedStore:
    return GatedStore(tmp_path.as_uri())


@pytest.fixture
def workers(store: GatedStore) -> Iterator[list[Uploads]]:
    uploads = [Uploads(store, job="job-1", keep=2) for _ in range(2)]
    yield uploads
    store.gate.set()
    for upload in uploads:
        upload.close(wait=True)


def report(workers: list[Uploads], tracker: PartTracker) -> bool:
    """One round: every member's news reaches the tracker."""
    for upload in workers:
        for name, part in upload.stored():
            tracker.add(name, part)
    return tracker.complete


def test_members_store_their_parts_and_one_commits(store: GatedStore, workers: list[Uploads]) -> None:
    for value, checkpoint in ((1.0, FIRST), (2.0, SECOND), (3.0, THIRD)):
        taken = [snapshot(value) for _ in workers]
        tracker = PartTracker(checkpoint.name, taken[0].num_parts)
        for rank, upload in enumerate(workers):
            assert upload.start(taken[rank], checkpoint) is None
            upload.assign(tracker.missing(rank, 2))
            assert upload.current == checkpoint
        until(lambda tracker=tracker: report(workers, tracker))
        workers[0].commit(tracker.parts)
        (manifest,) = until(workers[0].committed)
        assert manifest.checkpoint == checkpoint
        for rank, upload in enumerate(workers):
            upload.finish(checkpoint)
            assert upload.current is None
            assert upload.error is None
            until(lambda rank=rank, taken=taken: taken[rank].free)
    loaded, _ = store.load_newest(allocate)
    assert loaded is not None
    assert unflatten(loaded.skeleton, loaded.tensors)["w"].tolist() == [3.0] * 100
    workers[0].close(wait=True)
    assert store.complete() == [THIRD, SECOND]


def test_parts_of_a_member_that_left_are_taken_over(store: GatedStore, workers: list[Uploads]) -> None:
    stays, leaves = workers
    tracker = PartTracker(FIRST.name, snapshot().num_parts)
    for rank, upload in enumerate(workers):
        upload.start(snapshot(), FIRST)
        upload.assign(tracker.missing(rank, 2))
    leaves.close(wait=False)
    until(lambda: set(tracker.missing(0, 1)) == set(tracker.missing(1, 2)) or report([stays], tracker))
    stays.assign(tracker.missing(0, 1))
    until(lambda: report([stays], tracker))


def test_a_part_whose_report_was_lost_is_reported_again(workers: list[Uploads]) -> None:
    upload = workers[0]
    upload.start(snapshot(), FIRST)
    upload.assign([0])
    lost = until(upload.stored)
    assert upload.stored() == []
    upload.assign([0])
    assert upload.stored() == lost


def test_a_newer_checkpoint_takes_the_place_of_the_one_that_waits(store: GatedStore, workers: list[Uploads]) -> None:
    upload = workers[0]
    taken = [snapshot() for _ in range(3)]
    store.gate.clear()
    assert upload.start(taken[0], FIRST) is None
    upload.assign([0, 1])
    assert store.entered.wait(30)
    assert upload.start(taken[1], SECOND) is None
    assert upload.start(taken[2], THIRD) == SECOND
    assert taken[1].free
    upload.finish(SECOND)
    assert upload.current == FIRST
    upload.finish(FIRST)
    assert upload.current == THIRD
    assert not taken[0].free
    store.gate.set()
    until(lambda: taken[0].free)
    assert upload.stored() == []
    upload.assign([0])
    assert until(upload.stored)[0][0] == THIRD.name


def test_what_the_storage_does_not_take_is_tried_again(store: GatedStore, workers: list[Uploads]) -> None:
    upload = workers[0]
    store.failure = StorageError("write x", "no space is left there", "free some")
    upload.start(snapshot(), FIRST)
    upload.assign([0])
    assert "no space" in str(until(lambda: upload.failure))
    assert upload.current is not None
    assert upload.error is None
    store.failure = None
    assert len(until(upload.stored)) == 1
    assert upload.failure is None


def test_a_storage_that_fails_does_not_keep_a_worker_from_ending(store: GatedStore, workers: list[Uploads]) -> None:
    upload = workers[0]
    store.failure = StorageError("write x", "no space is left there", "free some")
    upload.start(snapshot(), FIRST)
    upload.assign([0])
    until(lambda: upload.failure)
    upload.close(wait=True)


def test_the_final_model_is_stored_once_the_storage_takes_it(
    store: GatedStore, workers: list[Uploads], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = workers[0]
    put_file = store.put_file
    monkeypatch.setattr(store, "put_file", failing)
    upload.store_model({"w": torch.ones(2)}, "models/lineage-1.safetensors")
    assert "no space" in str(until(lambda: upload.failure))
    assert not upload.has_stored_model
    monkeypatch.setattr(store, "put_file", put_file)
    until(lambda: upload.has_stored_model)


def test_the_final_model_is_stored_once_there_is_space_for_temporary_files(
    store: GatedStore, workers: list[Uploads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    upload = workers[0]
    upload.store_model({"w": torch.ones(2)}, "models/lineage-1.safetensors")
    failure = until(lambda: upload.failure)
    assert "free some space in the temporary folder of this host" in str(failure)
    assert str(folder) in str(failure)
    folder.mkdir()
    until(lambda: upload.has_stored_model)
    assert upload.error is None


def failing(key: str, content: object) -> None:
    raise StorageError(f"write {key}", "no space is left there", "free some")


def test_an_unexpected_failure_is_reported(store: GatedStore, workers: list[Uploads]) -> None:
    upload = workers[0]
    store.failure = RuntimeError("bug")
    upload.start(snapshot(), FIRST)
    upload.assign([0])
    assert "RuntimeError('bug')" in str(until(lambda: upload.error))


def test_a_member_with_another_state_is_found_out_before_the_manifest(
    store: GatedStore, workers: list[Uploads]
) -> None:
    tracker = PartTracker(FIRST.name, snapshot().num_parts)
    for rank, upload in enumerate(workers):
        upload.start(snapshot(float(rank)), FIRST)
        upload.assign(tracker.missing(rank, 2))
    until(lambda: report(workers, tracker))
    workers[0].commit(tracker.parts)
    assert "members have different bytes" in str(until(lambda: workers[0].error))
    assert store.complete() == []


def test_closing_waits_for_what_was_assigned(store: GatedStore) -> None:
    upload = Uploads(store, job="job-1", keep=1)
    taken = snapshot()
    tracker = PartTracker(FIRST.name, taken.num_parts)
    upload.start(taken, FIRST)
    upload.assign(tracker.missing(0, 1))
    upload.close(wait=True)
    assert report([upload], tracker)


def test_without_a_checkpoint_nothing_happens(workers: list[Uploads]) -> None:
    upload = workers[0]
    upload.assign([0])
    upload.commit([])
    upload.finish(FIRST)
    assert (upload.current, upload.stored(), upload.committed(), upload.error) == (None, [], [], None)
