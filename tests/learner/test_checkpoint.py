"""Checkpoints exist whole or not at all, and what is read is what was written."""

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from obstore import exceptions as foreign
from torch import nn

from resile_learner.checkpoint.final_model import UnsupportedModelError, save_model
from resile_learner.checkpoint.manifest import (
    CheckpointId,
    DivergedError,
    Manifest,
    PartInfo,
    PartTracker,
    SkeletonInfo,
    outdated,
    part_key,
)
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.checkpoint.store import CheckpointStore, DamagedError, Loaded, TakenError
from resile_learner.state.flat import Allocate, allocate, flatten, unflatten
from resile_shared.storage.objects import MissingObjectError, ObjectStorage, StorageError, _translated

from .copy_streams import FakeStream, staged_by

PART_BYTES = 500
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def state(seed: int = 0, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = {f"layer{i}": torch.randn(size, generator=generator) for i, size in enumerate([(30, 20), (7,), (), (0, 3)])}
    return {"model": model, "iteration": seed, "half": torch.ones(11, dtype=torch.bfloat16), **more}


def store_parts(store: CheckpointStore, tree: Any, checkpoint: CheckpointId) -> Manifest:
    snapshot = Snapshot(flatten(tree), part_bytes=PART_BYTES)
    parts = [store.put_part(checkpoint.name, k, snapshot.part(k)) for k in range(snapshot.num_parts)]
    return Manifest.of(checkpoint, job="job-1", parts=parts, created=NOW)


def save(store: CheckpointStore, seed: int, generation: int = 1, lineage: int = 1) -> Manifest:
    manifest = store_parts(store, state(seed), CheckpointId(lineage, seed, generation))
    assert store.commit(manifest)
    return manifest


def load_newest(store: CheckpointStore, allocate: Allocate = allocate) -> Loaded:
    loaded, _ = store.load_newest(allocate)
    assert loaded is not None
    return loaded


def tree_of(loaded: Loaded) -> Any:
    return unflatten(loaded.skeleton, loaded.tensors)


def same_state(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return str(left) == str(right) and all(torch.equal(left["model"][k], right["model"][k]) for k in right["model"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "my run"


@pytest.fixture
def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder.as_uri())


def part_file(folder: Path, checkpoint: CheckpointId, number: int) -> Path:
    return folder / "checkpoints" / checkpoint.name / f"part-{number:05d}"


def test_a_checkpoint_is_read_back_as_it_was(store: CheckpointStore, folder: Path) -> None:
    manifest = save(store, 1200, generation=3)
    assert len(manifest.parts) > 3
    assert sorted(path.name for path in (folder / "checkpoints" / "lineage-1" / "000000001200-g3").iterdir())[:2] == [
        "manifest.json",
        "part-00000",
    ]
    loaded, skipped = store.load_newest(allocate)
    assert loaded is not None
    assert loaded.manifest == manifest
    assert skipped == ()
    assert same_state(tree_of(loaded), state(1200))


def test_tensors_are_read_straight_into_their_targets(store: CheckpointStore) -> None:
    save(store, 5)
    target = torch.zeros(30, 20)
    loaded = load_newest(store, lambda skeleton: allocate(skeleton, {"model/layer0": target}))
    assert torch.equal(target, state(5)["model"]["layer0"])
    assert tree_of(loaded)["model"]["layer0"].data_ptr() == target.data_ptr()


def test_a_checkpoint_of_another_format_is_not_deleted(store: CheckpointStore, folder: Path) -> None:
    for iteration in (10, 20, 30, 40):
        save(store, iteration)
    manifest = folder / "checkpoints" / CheckpointId(1, 20, 1).name / "manifest.json"
    manifest.write_text(json.dumps({"format": 1, "of": "another version"}))
    assert store.prune(1, lineage=1) == [CheckpointId(1, 10, 1), CheckpointId(1, 30, 1)]
    assert part_file(folder, CheckpointId(1, 20, 1), 0).exists()


def test_a_state_without_tensors_can_be_saved(store: CheckpointStore) -> None:
    store.commit(store_parts(store, {"a": 1}, CheckpointId(1, 0, 1)))
    assert tree_of(load_newest(store)) == {"a": 1}


@pytest.mark.parametrize("part_bytes", [100, PART_BYTES, 10_000])
def test_a_checkpoint_whose_parts_do_not_begin_with_the_tensors_is_read(
    store: CheckpointStore, folder: Path, part_bytes: int
) -> None:
    """Older versions cut skeleton and tensors as one stream."""
    checkpoint, objects, parts = CheckpointId(1, 5, 1), ObjectStorage(folder.as_uri()), []
    snapshot = Snapshot(flatten(state(5)))
    stream = joined(snapshot)
    for number, start in enumerate(range(0, len(stream), part_bytes)):
        content = stream[start : start + part_bytes]
        objects.put(part_key(checkpoint.name, number), [content])
        parts.append(PartInfo(number=number, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
    sha = hashlib.sha256(snapshot.skeleton).hexdigest()
    skeleton = SkeletonInfo(num_bytes=len(snapshot.skeleton), sha256=sha)
    manifest = Manifest.of(checkpoint, job="job-1", parts=parts, created=NOW)
    assert store.commit(manifest.model_copy(update={"skeleton": skeleton}))
    assert same_state(tree_of(load_newest(store)), state(5))


@pytest.mark.parametrize(
    ("first", "is_kept"),
    [
        (flatten({"a": 1, "may_differ": {"time": 12.75}}).skeleton, True),
        (flatten({"a": 1, "may_differ": {}}).skeleton, True),
        (flatten({"a": 2, "may_differ": {"time": 1.5}}).skeleton, False),
        (flatten({"a": 1.0, "may_differ": {"time": 1.5}}).skeleton, False),
        (flatten({"a": 1}).skeleton, True),
        (flatten([1]).skeleton, False),
        (b'{"damaged', False),
    ],
)
def test_a_skeleton_stays_as_it_was_stored_first_if_it_differs_only_where_it_may(
    store: CheckpointStore, folder: Path, first: bytes, is_kept: bool
) -> None:
    """A member that is late would otherwise damage a checkpoint whose manifest another one has written."""
    file = part_file(folder, CheckpointId(1, 5, 1), 0)
    file.parent.mkdir(parents=True)
    file.write_bytes(first)
    skeleton = flatten({"a": 1, "may_differ": {"time": 1.5}}).skeleton
    info = store.put_part(CheckpointId(1, 5, 1).name, 0, [memoryview(skeleton)])
    kept = first if is_kept else skeleton
    assert file.read_bytes() == kept
    assert info == PartInfo(number=0, num_bytes=len(kept), sha256=hashlib.sha256(kept).hexdigest())


def test_no_checkpoint_at_all_is_not_an_error(store: CheckpointStore) -> None:
    assert store.load_newest(allocate) == (None, ())
    assert store.complete() == []
    assert store.prune(1, lineage=1) == []


def test_without_a_manifest_a_checkpoint_does_not_exist(store: CheckpointStore) -> None:
    save(store, 1)
    store_parts(store, state(2), CheckpointId(1, 2, 1))
    assert store.complete() == [(1, 1, 1)]
    assert tree_of(load_newest(store))["iteration"] == 1
    with pytest.raises(DamagedError, match="its manifest is missing"):
        store.load(CheckpointId(1, 2, 1).name, allocate)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("number", [0, 2, -1])
@pytest.mark.parametrize("damage", [truncate, lengthen, flip, empty, Path.unlink])
def test_a_damaged_part_makes_an_older_checkpoint_be_used(
    store: CheckpointStore, folder: Path, damage: Callable[[Path], None], number: int
) -> None:
    for seed in (1, 2, 3):
        save(store, seed)
    last = len(store.load(CheckpointId(1, 3, 1).name, allocate).manifest.parts) - 1
    number = last if number < 0 else number
    for seed in (2, 3):
        damage(part_file(folder, CheckpointId(1, seed, 1), number))
    loaded, skipped = store.load_newest(allocate)
    assert loaded is not None
    assert same_state(tree_of(loaded), state(1))
    assert [damaged.name for damaged in skipped] == ["lineage-1/000000000003-g1", "lineage-1/000000000002-g1"]
    assert all(damaged.reason for damaged in skipped)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda manifest: manifest.update(format="new"), "format"),
        (lambda manifest: manifest["parts"].pop(), "sizes do not add up"),
        (lambda manifest: manifest["parts"].reverse(), "numbered"),
        (lambda manifest: manifest["skeleton"].update(num_bytes=1_000_000), "sizes do not add up"),
        (lambda manifest: manifest.update(digest="0" * 64), "digest"),
        (lambda manifest: manifest.update(iteration=7), "that of lineage-1/000000000007"),
        (lambda manifest: manifest["skeleton"].update(sha256="0" * 64), "checksum of its skeleton"),
        (lambda manifest: manifest["skeleton"].update(num_bytes=10), "checksum of its skeleton"),
        (lambda manifest: manifest.clear(), "job"),
    ],
)
def test_a_damaged_manifest_makes_an_older_checkpoint_be_used(
    store: CheckpointStore, folder: Path, change: Callable[[Any], None], reason: str
) -> None:
    save(store, 1)
    save(store, 2)
    path = folder / "checkpoints" / "lineage-1" / "000000000002-g1" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))
    loaded, skipped = store.load_newest(allocate)
    assert loaded is not None
    assert loaded.manifest.iteration == 1
    assert reason in skipped[0].reason


def test_a_manifest_of_garbage_does_not_count_as_complete(store: CheckpointStore, folder: Path) -> None:
    save(store, 1)
    path = folder / "checkpoints" / "lineage-1" / "000000000002-g1"
    path.mkdir()
    (path / "manifest.json").write_bytes(b"\x80garbage")
    assert store.complete() == [(1, 1, 1)]
    assert store.prune(1, lineage=1) == []


def test_when_every_checkpoint_is_damaged_nothing_starts_over_silently(store: CheckpointStore, folder: Path) -> None:
    save(store, 1)
    part_file(folder, CheckpointId(1, 1, 1), 0).unlink()
    loaded, (skipped,) = store.load_newest(allocate)
    assert loaded is None
    assert "part-00000 is missing" in skipped.reason


def test_a_second_commit_of_the_same_bits_is_success(store: CheckpointStore) -> None:
    save(store, 1)
    manifest = store_parts(store, state(1), CheckpointId(1, 1, 1))
    later = manifest.model_copy(update={"created": datetime(2027, 1, 1, tzinfo=UTC)})
    assert store.commit(later) is False
    assert store.load(CheckpointId(1, 1, 1).name, allocate).manifest.created == NOW


def test_a_second_commit_of_other_bits_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    other = store_parts(CheckpointStore("memory:///"), state(2), CheckpointId(1, 1, 1))
    with pytest.raises(TakenError, match=r"already exists with other bits. Use a storage folder of its own"):
        store.commit(other)


def test_the_digest_of_a_manifest_is_that_of_its_parts(store: CheckpointStore) -> None:
    manifest = save(store, 1)
    hashes = [part.sha256 for part in manifest.parts]
    assert manifest.digest == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert manifest.num_bytes == sum(part.num_bytes for part in manifest.parts)


def test_pruning_keeps_the_newest_and_what_is_on_its_way(store: CheckpointStore, folder: Path) -> None:
    for seed in (10, 20, 30):
        save(store, seed)
    store_parts(store, state(), CheckpointId(1, 15, 1))
    store_parts(store, state(), CheckpointId(1, 40, 1))
    (folder / "checkpoints" / "lineage-1" / "000000000010-g1" / "part-00000#1").write_bytes(
        b"left by a process that was killed"
    )
    (folder / "checkpoints" / "lineage-1" / "notes.txt").write_text("not ours")
    assert store.prune(2, lineage=1) == [(1, 10, 1), (1, 15, 1)]
    assert sorted(path.name for path in (folder / "checkpoints" / "lineage-1").iterdir()) == [
        "000000000020-g1",
        "000000000030-g1",
        "000000000040-g1",
        "notes.txt",
    ]
    assert store.prune(0, lineage=1) == [(1, 20, 1)]
    assert store.complete() == [(1, 30, 1)]


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(store: CheckpointStore, folder: Path) -> None:
    for seed in (10, 20, 30, 40):
        save(store, seed)
    truncate(part_file(folder, CheckpointId(1, 20, 1), 1))
    part_file(folder, CheckpointId(1, 40, 1), 0).unlink()
    assert store.complete() == [(1, 30, 1), (1, 10, 1)]
    assert store.prune(2, lineage=1) == [(1, 20, 1)]
    assert store.prune(1, lineage=1) == [(1, 10, 1)]


def test_a_checkpoint_that_was_found_damaged_does_not_keep_a_whole_one_from_being_kept(
    store: CheckpointStore, folder: Path
) -> None:
    for seed in (10, 20, 30):
        save(store, seed)
    flip(part_file(folder, CheckpointId(1, 30, 1), 1))
    assert load_newest(store).manifest.iteration == 20
    assert store.prune(2, lineage=1) == []
    save(store, 40, generation=2)
    assert store.prune(2, lineage=1) == [(1, 10, 1), (1, 30, 1)]
    assert store.complete() == [(1, 40, 2), (1, 20, 1)]


ids = st.sets(st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 20), st.integers(1, 3)), max_size=10)


@given(ids, ids, st.integers(0, 5))
def test_what_is_outdated(complete: set[CheckpointId], partial: set[CheckpointId], keep: int) -> None:
    old = outdated(complete, complete | partial, keep)
    assert old == sorted(old)
    left = complete - set(old)
    assert len(left) == min(len(complete), max(keep, 1))
    if complete:
        assert max(complete) in left
        assert min(left) > max(complete - left, default=CheckpointId(0, -1, 0))
        assert all((checkpoint in old) == (checkpoint < max(complete)) for checkpoint in partial - complete)
    else:
        assert old == []


@given(st.integers(0, 10**13), st.integers(0, 10**6))
def test_names_are_read_back_and_sort_by_iteration(iteration: int, generation: int) -> None:
    checkpoint = CheckpointId(2, iteration, generation)
    assert CheckpointId.parse(checkpoint.name) == checkpoint
    assert CheckpointId(2, 120, 3).name == "lineage-2/000000000120-g3"
    assert CheckpointId.parse("part-00000") is None


def part(number: int, sha: str = "0") -> PartInfo:
    return PartInfo(number=number, num_bytes=1, sha256=sha * 64)


def test_members_divide_the_parts_and_divide_anew_what_is_missing() -> None:
    tracker = PartTracker("c", 7)
    assert [tracker.missing(rank, 3) for rank in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]
    for number in (0, 3, 5):
        tracker.add("c", part(number))
        tracker.add("c", part(number))
    tracker.add("other", part(1))
    assert [tracker.missing(rank, 2) for rank in range(2)] == [(2, 4, 6), (1,)]
    assert not tracker.complete
    for number in (6, 1, 2, 4):
        tracker.add("c", part(number))
    assert tracker.complete
    assert [info.number for info in tracker.parts] == list(range(7))


@given(st.integers(1, 20), st.sets(st.integers(0, 19)), st.integers(1, 6))
def test_every_missing_part_has_exactly_one_rank(num_parts: int, stored: set[int], num_ranks: int) -> None:
    tracker = PartTracker("c", num_parts)
    for number in stored & set(range(num_parts)):
        tracker.add("c", part(number))
    missing = [number for rank in range(num_ranks) for number in tracker.missing(rank, num_ranks)]
    assert sorted(missing) == sorted(set(range(num_parts)) - stored)
    assert tracker.complete == (not missing)


@pytest.mark.parametrize("other", [part(1, "1"), part(2)])
def test_members_that_report_one_part_differently_are_detected(other: PartInfo) -> None:
    tracker = PartTracker("c", 2)
    tracker.add("c", part(1))
    with pytest.raises(DivergedError, match="members have different bytes"):
        tracker.add("c", other)


def joined(snapshot: Snapshot) -> bytes:
    return b"".join(b"".join(snapshot.part(k)) for k in range(snapshot.num_parts))


def test_a_snapshot_keeps_what_training_changes() -> None:
    weight = torch.arange(12.0).reshape(3, 4).t()
    flat = flatten([weight])
    snapshot = Snapshot(flat, part_bytes=20)
    before = joined(snapshot)
    weight += 1
    assert joined(snapshot) == before
    assert before.endswith(torch.arange(12.0).numpy().tobytes())
    assert [sum(map(len, snapshot.part(k))) for k in range(snapshot.num_parts)] == [len(flat.skeleton), 20, 20, 8]
    assert b"".join(snapshot.part(0)) == flat.skeleton


@pytest.mark.parametrize("late", [False, True])
def test_a_snapshot_of_tensors_on_a_device_goes_through_two_small_buffers(late: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tree = [torch.randn(3_000_000, generator=generator), torch.ones(7, dtype=torch.bfloat16), torch.zeros(0)]
    stream = FakeStream(late=late)
    snapshot = Snapshot(flatten(tree), stream_of=staged_by(stream))
    assert joined(snapshot) == joined(Snapshot(flatten(tree)))
    assert [len(buffer) for buffer in stream.buffers] == [8 << 20] * 2
    assert stream.num_done == stream.num_started == 2


def test_a_snapshot_takes_over_the_memory_of_a_released_one_only() -> None:
    first = Snapshot(flatten([torch.ones(100)]))
    address = first._tensors[0].data_ptr()
    second = Snapshot(flatten([torch.zeros(100)]), reuse=first)
    assert second._tensors[0].data_ptr() != address
    first.release()
    assert Snapshot(flatten([torch.zeros(99)]), reuse=first)._tensors[0].data_ptr() != address
    third = Snapshot(flatten([torch.full((100,), 2.0)]), reuse=first)
    assert third._tensors[0].data_ptr() == address
    assert joined(third).endswith(torch.full((100,), 2.0).numpy().tobytes())
    assert Snapshot(flatten([torch.zeros(100)]), reuse=first)._tensors[0].data_ptr() != address


def test_loading_needs_little_memory_beside_the_tensors(store: CheckpointStore) -> None:
    tree = {"weights": torch.zeros(40_000_000, dtype=torch.uint8)}
    snapshot = Snapshot(flatten(tree), part_bytes=20_000_000)
    checkpoint = CheckpointId(1, 1, 1)
    parts = [store.put_part(checkpoint.name, k, snapshot.part(k)) for k in range(snapshot.num_parts)]
    store.commit(Manifest.of(checkpoint, job="j", parts=parts, created=NOW))
    room = torch.ones(40_000_000, dtype=torch.uint8)
    tracemalloc.start()
    load_newest(store, lambda skeleton: allocate(skeleton, {"weights": room}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not room.any()
    assert peak < 2_000_000  # python's own; what obstore hands over are pieces of 8 MiB, four at once


@pytest.mark.parametrize("read_bytes", [64, PART_BYTES // 2, PART_BYTES])
def test_a_part_is_read_in_pieces_and_whole(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    save(store, 5)
    monkeypatch.setattr("resile_learner.checkpoint.store._READ_BYTES", read_bytes)
    sizes: list[int] = []
    read_range = ObjectStorage.read_range

    def note(objects: ObjectStorage, key: str, start: int, stop: int) -> memoryview:
        if not key.endswith("part-00000"):  # the skeleton, which is read at once
            sizes.append(stop - start)
        return read_range(objects, key, start, stop)

    monkeypatch.setattr(ObjectStorage, "read_range", note)
    assert same_state(tree_of(load_newest(store)), state(5))
    assert max(sizes) == read_bytes


def test_what_is_written_to_a_folder_is_on_its_disk_and_parts_before_their_manifest(
    store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append("" if path == folder else str(path.relative_to(folder)))

    monkeypatch.setattr(os, "fsync", record)
    manifest = store_parts(store, state(3), CheckpointId(1, 3, 1))
    name = "checkpoints/lineage-1/000000000003-g1"
    folders = {name, "checkpoints/lineage-1", "checkpoints", ""}
    assert {*folders, *(f"{name}/part-{part.number:05d}" for part in manifest.parts)} == set(synced)
    synced.clear()
    store.commit(manifest)
    assert set(synced) == {*folders, f"{name}/manifest.json"}
    synced.clear()
    file = folder / "model"
    file.write_bytes(b"x")
    store.put_file("models/lineage-1.safetensors", file)
    assert set(synced) == {"models/lineage-1.safetensors", "models", ""}


def test_files_are_stored_and_fetched(store: CheckpointStore, folder: Path, tmp_path: Path) -> None:
    objects = ObjectStorage(folder.as_uri())
    source, notes = tmp_path / "source", tmp_path / "notes"
    source.write_bytes(b"x" * 20_000_000)
    store.put_file("final/model.safetensors", source)
    for content in (b"first", b""):
        notes.write_bytes(content)
        store.put_file("final/notes", notes)
    objects.download("final/model.safetensors", tmp_path / "a")
    objects.download("final/notes", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == source.read_bytes()
    assert (tmp_path / "b").read_bytes() == b""
    with pytest.raises(MissingObjectError, match=r"cannot read final/other in file://.* it is not there"):
        objects.download("final/other", tmp_path / "c")
    with pytest.raises(StorageError, match=r"cannot write .*/none/a: No such file"):
        objects.download("final/notes", tmp_path / "none" / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "my run", "notes", "source"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "ftp://host/x",
            "cannot use the storage 'ftp://host/x': it is not a URL of storage; use file:///folder, s3://",
        ),
        ("runs/1", "it is not a URL of storage"),
        ("s3://", "it is not a URL of storage"),
        ("file:///proc/none/x", "there is no such folder; create it"),
        ("file:///etc/passwd/x", "a part of the path is a file, not a folder; choose another folder"),
        ("az://account", "lacks a setting"),
    ],
)
def test_a_url_that_cannot_be_used_is_explained(url: str, message: str) -> None:
    with pytest.raises(StorageError) as caught:
        CheckpointStore(url)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_turns_out_to_be_a_file_is_explained(store: CheckpointStore, folder: Path) -> None:
    (folder / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write checkpoints/.* in file://.*: a part of the path is a file"):
        save(store, 1)


@pytest.mark.parametrize(
    ("error", "message", "transient"),
    [
        (foreign.GenericError("Unable to copy data to file: No space left on device (os error 28)"), "no space", False),
        (foreign.GenericError("Unable to open file /x: Permission denied (os error 13)"), "permission denied", False),
        (foreign.GenericError("Unable to open file /x: Read-only file system (os error 30)"), "read-only", False),
        (
            foreign.PermissionDeniedError("The operation lacked the necessary privileges\n\nDebug"),
            "permission denied",
            False,
        ),
        (
            foreign.GenericError("Server returned non-2xx status code: 403 Forbidden"),
            "permission denied; check the",
            False,
        ),
        (FileNotFoundError("Object at location x not found: NoSuchBucket"), "there is no such bucket", False),
        (foreign.GenericError("HTTP error: connection refused\n\nDebug"), "connection refused; check", True),
        (
            foreign.GenericError("Error performing PUT http://h/k in 7s - HTTP error: error sending request"),
            "the storage cannot be reached; check",
            True,
        ),
        (
            foreign.GenericError("Server returned non-2xx status code: 503 Service Unavailable"),
            "overloaded or out of order; check",
            True,
        ),
        (
            foreign.GenericError(
                "Error performing PUT http://h/k in 1.5ms - Server returned non-2xx status code: 400 Bad Request: "
                "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            ),
            "the credentials have expired; renew them",
            True,
        ),
        (
            foreign.GenericError(
                "Server returned non-2xx status code: 403 Forbidden: <Error><Code>RequestTimeTooSkewed</Code></Error>"
            ),
            "the clock of this machine and that of the storage differ; set the clock",
            True,
        ),
        (
            foreign.GenericError("Server returned non-2xx status code: 400 Bad Request: "),
            "the storage refuses the request: status 400; check the URL and the region",
            True,
        ),
        (
            foreign.GenericError("Server returned status code: 400 Bad Request: <Code>InvalidRegion</Code>"),
            "the storage refuses the request: status 400 InvalidRegion; check",
            True,
        ),
        (
            foreign.GenericError("Error performing PUT http://h/k in 25.769742ms - odd\n\nDebug"),
            "^cannot write k in s3://b: Error performing PUT http://h/k - odd; check",
            True,
        ),
        (
            foreign.GenericError("PUT http://169.254.169.254/latest/api/token - HTTP error: error sending request"),
            "there are no credentials for it; set AWS_ACCESS_KEY_ID",
            False,
        ),
        (
            foreign.GenericError("Unable to decode service account file: missing field `type` at line 1 column 2"),
            "the credentials cannot be read; correct",
            False,
        ),
    ],
)
def test_what_goes_wrong_in_storage_is_explained(error: Exception, message: str, transient: bool) -> None:
    translated = _translated("write k in s3://b", "k", error)
    assert str(translated).startswith("cannot write k in s3://b: ")
    assert translated.transient is transient
    with pytest.raises(StorageError, match=message):
        raise translated


def test_a_passing_failure_is_tried_again(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resile_shared.storage.objects._WAITS_SECONDS", (0.0, 0.0))
    objects = ObjectStorage("memory:///")
    failures = [foreign.GenericError("connection reset")] * 2
    put = objects._store.put

    class Flaky:
        def put(self, *args: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return put(*args, **options)

    objects._store = Flaky()  # type: ignore[assignment]
    objects.put("a", [b"1", memoryview(b"2")])
    failures += [foreign.GenericError("connection reset")] * 3
    with pytest.raises(StorageError, match="connection reset"):
        objects.put("b", [b""])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("halves", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t())
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("angle", torch.tensor(1j).conj())


def test_any_pytorch_user_opens_the_final_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied()
    model.norm(torch.randn(5, 3))
    pickled, path = save_model(model.state_dict(), tmp_path)
    for loaded in (safetensors.torch.load_file(path), torch.load(pickled, weights_only=True)):
        other = Tied()
        other.load_state_dict(loaded, strict=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
        assert other.head.weight is other.embedding.weight


def test_a_parameter_that_is_part_of_a_larger_tensor_is_stored_without_the_rest(tmp_path: Path) -> None:
    pickled, _ = save_model({"a": torch.zeros(1_000_000)[:3]}, tmp_path)
    assert pickled.stat().st_size < 10_000


def test_a_model_that_the_format_cannot_hold_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no dtype torch.complex128; save it in a callback"):
        save_model({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path)
    with pytest.raises(UnsupportedModelError, match="sparse"):
        save_model({"a": torch.eye(2).to_sparse()}, tmp_path)
    with pytest.raises(StorageError, match=r"cannot write .*check the folder"):
        save_model({"a": torch.eye(2)}, tmp_path / "none")
