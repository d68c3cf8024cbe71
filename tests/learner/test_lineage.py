"""One lineage in storage: members that were cut off change nothing, and a cold start begins with one checkpoint."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from resile_learner.checkpoint.lineage import Start, ancestry, lineage_of
from resile_learner.checkpoint.manifest import CheckpointId, Manifest, manifest_key, part_key
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.checkpoint.store import CheckpointStore, DamagedError, LineageFencedError, load_agreed
from resile_learner.state.flat import allocate, flatten, unflatten
from resile_shared.messages.allocations import StoredCheckpoint
from resile_shared.storage.objects import ObjectStorage, StorageError

NOW = datetime(2026, 1, 2, tzinfo=UTC)


class Storage:
    """A job's storage, and what its members do with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = ObjectStorage(folder.as_uri())

    def save(self, lineage: int, iteration: int) -> CheckpointId:
        """Store a checkpoint as a member of ``lineage`` does."""
        manifest = self.store_parts(lineage, iteration)
        CheckpointStore(self.folder.as_uri()).commit(manifest)
        return manifest.checkpoint

    def save_late(self, lineage: int, iteration: int) -> CheckpointId:
        """The same by a member that looked for a newer lineage before there was one, and then took its time."""
        manifest = self.store_parts(lineage, iteration)
        self.objects.put(manifest_key(manifest.checkpoint.name), [manifest.model_dump_json().encode()])
        return manifest.checkpoint

    def store_parts(self, lineage: int, iteration: int) -> Manifest:
        checkpoint = CheckpointId(lineage, iteration, lineage)
        tree = {"lineage": lineage, "iteration": iteration, "w": torch.full((100,), float(iteration))}
        snapshot = Snapshot(flatten(tree), part_bytes=200)
        store = CheckpointStore(self.folder.as_uri())
        parts = [store.put_part(checkpoint.name, k, snapshot.part(k)) for k in range(snapshot.num_parts)]
        return Manifest.of(checkpoint, job="job-1", parts=parts, created=NOW)

    def start(self, lineage: int, during: Callable[[], object] = lambda: None) -> tuple[int, int] | None:
        """Begin as an initial member of ``lineage``; what happens ``during`` the first read. Returns what it loads."""
        has_begun = False

        def allocate_then(skeleton: bytes) -> Sequence[Tensor]:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                during()
            return allocate(skeleton)

        store = CheckpointStore(self.folder.as_uri())
        _, loaded = load_agreed(store, job="job-1", lineage=lineage, allocate=allocate_then)
        if loaded is None:
            return None
        tree = unflatten(loaded.skeleton, loaded.tensors)
        return tree["lineage"], tree["iteration"]

    def damage(self, checkpoint: CheckpointId) -> Callable[[], None]:
        """Damage a part; returns what repairs it."""
        key = part_key(checkpoint.name, 1)
        content = self.objects.read(key)
        self.objects.put(key, [content[:-1] + b"\x00"])
        return lambda: self.objects.put(key, [content])

    def prune(self, lineage: int) -> list[CheckpointId]:
        return CheckpointStore(self.folder.as_uri()).prune(1, lineage=lineage)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def test_a_cold_start_begins_with_the_newest_checkpoint_of_the_lineage_before(storage: Storage) -> None:
    storage.save(1, 10)
    storage.save(1, 20)
    assert storage.start(2) == (1, 20)
    storage.save(2, 15)
    assert storage.start(3) == (2, 15), "what follows a cold start is newer, at whatever iteration"


def test_members_that_were_cut_off_store_and_delete_nothing_once_there_is_a_newer_lineage(storage: Storage) -> None:
    for iteration in (10, 20):
        storage.save(1, iteration)
    assert storage.start(2) == (1, 20)
    fenced = r"this is start 1 of the job, but file://.* is used by start 2 already"
    with pytest.raises(LineageFencedError, match=fenced):
        storage.save(1, 30)
    with pytest.raises(LineageFencedError):
        storage.prune(1)
    assert storage.start(3) == (1, 20)


def test_what_members_that_were_cut_off_stored_nevertheless_is_no_ancestor_of_anything(storage: Storage) -> None:
    storage.save(1, 20)
    assert storage.start(2) == (1, 20)
    late = storage.save_late(1, 30)
    assert storage.start(3) == (1, 20)
    storage.save(3, 25)
    assert storage.start(4) == (3, 25)
    storage.save(4, 26)
    assert late in storage.prune(4)


def test_a_checkpoint_that_is_being_loaded_is_not_deleted_by_members_that_were_cut_off(storage: Storage) -> None:
    storage.save(1, 10)
    storage.save(1, 20)

    def cut_off() -> None:
        for iteration in (30, 40):
            storage.save_late(1, iteration)
        with pytest.raises(LineageFencedError):
            storage.prune(1)

    assert storage.start(2, during=cut_off) == (1, 20)


def test_checkpoints_that_are_deleted_while_they_are_read_are_replaced_by_newer_ones(storage: Storage) -> None:
    for iteration in (10, 20):
        storage.save(1, iteration)

    def cut_off() -> None:  # its listing is from before the fence
        storage.save_late(1, 30)
        for iteration in (10, 20):
            storage.objects.delete_folder(f"checkpoints/{CheckpointId(1, iteration, 1).name}/")

    assert storage.start(2, during=cut_off) == (1, 30)


def test_all_initial_members_begin_with_the_checkpoint_that_the_first_of_them_decided_on(storage: Storage) -> None:
    storage.save(1, 20)
    first: list[object] = []

    def another_member() -> None:
        storage.save_late(1, 30)
        first.append(storage.start(2))

    assert storage.start(2, during=another_member) == (1, 30)
    assert first == [(1, 30)]
    storage.save_late(1, 40)
    assert storage.start(2) == (1, 30), "a member that comes later finds a newer one, and does not use it"


def test_a_member_that_cannot_read_what_was_decided_on_never_uses_another(storage: Storage) -> None:
    storage.save(1, 10)
    newest = storage.save(1, 20)
    assert storage.start(2) == (1, 20)
    repair = storage.damage(newest)
    with pytest.raises(DamagedError, match="the checksum of part 1 is wrong"):
        storage.start(2)
    repair()
    assert storage.start(2) == (1, 20)
    storage.damage(newest)
    assert storage.start(3) == (1, 10), "the next cold start decides again"


class LaggingObjects(ObjectStorage):
    """The first listings are older than the last writes, and each read arrives damaged the first time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._old = [super().sizes("checkpoints/")] * 3
        self._num_reads: Counter[tuple[str, int]] = Counter()

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._old.pop() if self._old else super().sizes(prefix)

    def read_range(self, key: str, start: int, stop: int) -> memoryview:
        content = super().read_range(key, start, stop)
        self._num_reads[key, stop] += 1
        return memoryview(bytes(len(content))) if self._num_reads[key, stop] == 1 else content


def test_listings_that_lag_behind_and_reads_that_arrive_damaged_hide_no_checkpoint(storage: Storage) -> None:
    storage.save(1, 10)
    store = CheckpointStore(storage.folder.as_uri())
    store._objects = LaggingObjects(storage.folder.as_uri())
    storage.save(1, 20)
    start, loaded = load_agreed(store, job="job-1", lineage=2, allocate=allocate)
    assert loaded is not None
    assert (start.base, start.skipped) == (CheckpointId(1, 20, 1), ())
    assert loaded.manifest.checkpoint == start.base


def test_a_cold_start_that_came_too_late_ends(storage: Storage) -> None:
    storage.save(1, 20)
    assert storage.start(3) == (1, 20)
    with pytest.raises(LineageFencedError):
        storage.start(2)
    assert storage.start(4) == (1, 20)


class OvertakenObjects(ObjectStorage):
    """Before the first object is created, members of another cold start write their fence."""

    def __init__(self, url: str, lineage: int) -> None:
        super().__init__(url)
        self._lineages = [lineage]

    def create(self, key: str, content: bytes) -> bool:
        if self._lineages:
            CheckpointStore(self.url).fence(self._lineages.pop())
        return super().create(key, content)


def test_of_two_cold_starts_at_once_the_older_one_ends(storage: Storage) -> None:
    storage.save(1, 20)
    store = CheckpointStore(storage.folder.as_uri())
    store._objects = OvertakenObjects(storage.folder.as_uri(), 3)
    with pytest.raises(LineageFencedError):
        store.fence(2)
    assert storage.start(3) == (1, 20)


class HaltingObjects(ObjectStorage):
    """Whoever deletes a folder ends when some of it is deleted, in any order."""

    def delete_folder(self, prefix: str) -> None:
        self.delete(key for key in self.sizes(prefix) if "/part-" in key)
        raise StorageError("delete a folder", "the process was killed", "start it again")


def test_a_checkpoint_that_is_half_deleted_is_none(storage: Storage) -> None:
    old = storage.save(1, 10)
    storage.save(1, 20)
    store = CheckpointStore(storage.folder.as_uri())
    store._objects = HaltingObjects(storage.folder.as_uri())
    with pytest.raises(StorageError):
        store.prune(1, lineage=1)
    assert manifest_key(old.name) not in storage.objects.sizes("checkpoints/")


def test_a_lineage_that_began_with_nothing_has_no_older_checkpoints(storage: Storage) -> None:
    assert storage.start(2) is None
    storage.save_late(1, 30)
    assert storage.start(3) is None


def test_a_start_that_cannot_be_read_does_not_hide_older_checkpoints(storage: Storage) -> None:
    storage.save(1, 20)
    assert storage.start(2) == (1, 20)
    storage.objects.put("checkpoints/lineage-2/start.json", [b"garbage"])
    with pytest.raises(DamagedError, match="its start is not readable"):
        storage.start(2)
    assert storage.start(3) == (1, 20)


def test_pruning_removes_the_fences_and_starts_that_nothing_needs_any_more(storage: Storage) -> None:
    storage.save(1, 10)
    for lineage in (2, 3, 4):
        storage.start(lineage)
        storage.save(lineage, 10 * lineage)
        storage.prune(lineage)
    left = {lineage_of(key) for key in storage.objects.sizes("checkpoints/")}
    assert left == {4}
    assert storage.start(5) == (4, 40)


def test_pruning_keeps_what_the_oldest_lineage_began_with(storage: Storage) -> None:
    """An initial member that has been slow must not decide once more."""
    storage.save(1, 10)
    assert storage.start(2) == (1, 10)
    storage.save(2, 20)
    storage.prune(2)
    start = CheckpointStore(storage.folder.as_uri()).read_start(2)
    assert start is not None
    assert start.base == CheckpointId(1, 10, 1)


@pytest.mark.parametrize("checkpoint", ["lineage-2/000000000001-g1", "newest"])
def test_a_lineage_begins_with_a_checkpoint_of_an_older_one(checkpoint: str) -> None:
    with pytest.raises(ValueError, match=f"a start of lineage 2 cannot begin with {checkpoint}"):
        Start(job="job-1", lineage=2, checkpoint=checkpoint)


def test_an_object_without_a_lineage_belongs_to_none() -> None:
    assert lineage_of(manifest_key("lineage-3/000000000001-g1")) == 3
    assert lineage_of("checkpoints/another folder/part-00000") is None


def test_the_member_that_decides_reads_its_checkpoint_once(storage: Storage) -> None:
    storage.save(1, 20)
    reads: list[bytes] = []

    def allocate_and_count(skeleton: bytes) -> Sequence[Tensor]:
        reads.append(skeleton)
        return allocate(skeleton)

    store = CheckpointStore(storage.folder.as_uri())
    _, loaded = load_agreed(store, job="job-1", lineage=2, allocate=allocate_and_count)
    assert loaded is not None
    assert len(reads) == 1


def test_a_member_that_comes_later_reads_what_was_decided_on_and_looks_for_nothing_else(storage: Storage) -> None:
    """Listings may lag behind, or be slow; what the job has stored since is not what its members began with."""
    storage.save(1, 20)
    assert storage.start(2) == (1, 20)
    storage.save_late(1, 30)
    reads: list[bytes] = []

    def allocate_and_count(skeleton: bytes) -> Sequence[Tensor]:
        reads.append(skeleton)
        return allocate(skeleton)

    store = CheckpointStore(storage.folder.as_uri())
    known = StoredCheckpoint(lineage=1, iteration=40)
    start, loaded = load_agreed(store, job="job-1", lineage=2, allocate=allocate_and_count, known=known)
    assert loaded is not None
    assert loaded.manifest.checkpoint == start.base == CheckpointId(1, 20, 1)
    assert len(reads) == 1


def test_a_start_that_was_written_for_another_lineage_is_damaged(storage: Storage) -> None:
    """As after someone copied a folder: nothing says what the members of this lineage began with."""
    storage.save(1, 20)
    assert storage.start(2) == (1, 20)
    start = storage.objects.read("checkpoints/lineage-2/start.json")
    storage.objects.put("checkpoints/lineage-3/start.json", [start])
    with pytest.raises(DamagedError, match="its start is that of lineage 2"):
        storage.start(3)
    assert storage.start(4) == (1, 20)


checkpoints = st.builds(CheckpointId, st.integers(1, 5), st.integers(0, 9), st.integers(1, 3))


@given(st.sets(checkpoints, max_size=20), st.data())
def test_the_ancestry_is_one_path(found: set[CheckpointId], data: st.DataObject) -> None:
    bases = {}
    for lineage in data.draw(st.sets(st.integers(2, 6))):
        older = sorted(checkpoint for checkpoint in found if checkpoint.lineage < lineage)
        bases[lineage] = data.draw(st.sampled_from(older)) if older else None
    path = list(ancestry(found, bases))
    assert path == sorted(set(path), reverse=True)
    assert set(path) <= found
    for newer, older in pairwise(path):
        if newer.lineage != older.lineage:
            assert older <= (bases[newer.lineage] or older)
    if path and max(bases, default=0) <= path[0].lineage:
        assert path[0] == max(found)
