"""The checkpoints of one run in object storage: written part by part, completed by a manifest, verified when read."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from torch import Tensor

from resile_shared.errors import ResileError
from resile_shared.messages.allocations import StoredCheckpoint
from resile_shared.storage.objects import MissingObjectError, ObjectStorage, StorageError
from resile_shared.validation import describe_fault

from ..state.flat import Allocate
from ..state.memory import ByteStream, tensor_bytes
from ..state.run import is_same_state
from .lineage import START_FORMAT, DamagedCheckpoint, Start, ancestry, fence_key, lineage_of, start_key
from .manifest import (
    FOLDER,
    FORMAT,
    CheckpointId,
    Manifest,
    OtherFormatError,
    PartInfo,
    check_format,
    manifest_key,
    outdated,
    part_key,
)
from .snapshot import sha256

_READ_BYTES = 8 * 2**20
_ATTEMPTS = 2  # what arrives damaged may be whole in storage
_LISTINGS = 5
_READERS = 4  # with _READ_BYTES, what loading needs beside the tensors: 32 MiB


class DamagedError(ResileError):
    """A checkpoint has a manifest, but its parts are missing or differ from it."""

    def __init__(self, name: str, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(f"checkpoint {name} is damaged: {reason}; use an older one")
        self.name = name
        self.reason = reason
        self.is_missing = is_missing
        """Whether an object of it is not there."""


class LineageFencedError(ResileError):
    """A newer cold start of the job uses the storage: what the members of this one store does not count any more."""

    def __init__(self, url: str, lineage: int, newer: int) -> None:
        super().__init__(
            f"this is start {lineage} of the job, but {url} is used by start {newer} already: nothing more is stored "
            "here. Use a storage folder of its own for every run"
        )


class LostCheckpointError(ResileError):
    """The storage has no trace of a checkpoint that the job has stored there, nor of a newer one."""

    def __init__(self, url: str, known: StoredCheckpoint, newest: CheckpointId | None) -> None:
        found = f"the newest one there is {newest.name}" if newest else "there is none that is whole"
        super().__init__(
            f"the job has stored a checkpoint of iteration {known.iteration} in {url}, but {found}: make the storage "
            "available as it was, or start the job anew"
        )


class TakenError(ResileError):
    """A checkpoint of that name already exists, with other bits."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"cannot commit checkpoint {name}: it already exists with other bits. Use a storage folder of its own for "
            "every run"
        )


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read and verified; ``unflatten(skeleton, tensors)`` is the state."""

    manifest: Manifest
    skeleton: bytes
    tensors: Sequence[Tensor]


class Found(NamedTuple):
    """What a search for a checkpoint found."""

    loaded: Loaded | None
    """The newest complete checkpoint; None: there is none."""
    skipped: tuple[DamagedCheckpoint, ...] = ()
    """Newer checkpoints, which are damaged."""


class _Listing:
    """What there is below the folder of checkpoints."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.found = {checkpoint for key in sizes if (checkpoint := _checkpoint_of(key))}
        self.with_manifest = [checkpoint for checkpoint in self.found if manifest_key(checkpoint.name) in sizes]
        self.lineages = {lineage for key in sizes if (lineage := lineage_of(key))}
        self.starts = [lineage for lineage in self.lineages if start_key(lineage) in sizes]

    def shows(self, known: StoredCheckpoint) -> bool:
        """Whether something is left of ``known``, or of a newer checkpoint."""
        return any((one.lineage, one.iteration) >= (known.lineage, known.iteration) for one in self.found)


class CheckpointStore:
    """The checkpoints, and a few other files, of the run whose storage is ``url``.

    Calls block; any thread may call. All raise StorageError (see ``resile_shared.storage.objects``) when the storage
    fails.
    """

    def __init__(self, url: str) -> None:
        self._objects = ObjectStorage(url)
        self._found_damaged: set[str] = set()
        self._of_other_format: set[CheckpointId] = set()

    def put_part(self, name: str, number: int, buffers: Sequence[memoryview]) -> PartInfo:
        """Store one part of checkpoint ``name``, and return what is stored.

        Storing it twice is harmless: the bytes are the same, or the part is the skeleton, which is written once.
        """
        if number == 0:
            buffers = [self._put_skeleton(part_key(name, number), b"".join(buffers))]
        else:
            self._objects.put(part_key(name, number), buffers)
        return PartInfo(number=number, num_bytes=sum(map(len, buffers)), sha256=sha256(buffers))

    def _put_skeleton(self, key: str, skeleton: bytes) -> memoryview:
        """Write a skeleton, unless another member stored one whose state is the same, except for what may differ.

        Returns the stored one. It is not replaced, not even by a member that is late, since its checksum may already be
        in the manifest.
        """
        if not self._objects.create(key, skeleton):
            stored = self._objects.read(key)
            if is_same_state(stored, skeleton):
                return memoryview(stored)
            self._objects.put(key, [skeleton])
        return memoryview(skeleton)

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest, once all parts are stored. Returns False if it exists already, with the same bits.

        Raises TakenError if there is one with other bits, DamagedError if the object there is not a manifest,
        LineageFencedError if there is a newer lineage.
        """
        name = manifest.checkpoint.name
        self._list_unfenced(manifest.lineage)
        if self._objects.create(manifest_key(name), manifest.model_dump_json(indent=1).encode()):
            return True
        if self._read_manifest(name).digest != manifest.digest:
            raise TakenError(name)
        return False

    def fence(self, lineage: int) -> None:
        """End all lineages before ``lineage``. Raises LineageFencedError if there is a newer one."""
        self._objects.create(fence_key(lineage), b"")
        self._list_unfenced(lineage)

    def read_start(self, lineage: int) -> Start | None:
        """Read with which checkpoint ``lineage`` begins; None if that is not decided yet.

        Raises DamagedError if the object there is not readable, OtherFormatError if this version cannot read it.
        """
        name, key = f"lineage-{lineage}", start_key(lineage)
        try:
            content = self._objects.read(key)
            check_format(key, content, own=START_FORMAT)
            start = Start.model_validate_json(content)
        except MissingObjectError:
            return None
        except ValidationError as error:
            raise DamagedError(name, f"its start is not readable ({_first_fault(error)})") from error
        if start.lineage != lineage:
            raise DamagedError(name, f"its start is that of lineage {start.lineage}")
        return start

    def decide_start(self, start: Start) -> Start:
        """Decide with which checkpoint a lineage begins; return what was decided, which another may have done first."""
        if self._objects.create(start_key(start.lineage), start.model_dump_json(indent=1).encode()):
            return start
        return self.read_start(start.lineage) or start

    def complete(self) -> list[CheckpointId]:
        """List the job's checkpoints that have a well-formed manifest and all parts in their sizes, newest first.

        Those that this store has read before and found damaged are left out.
        """
        return self._complete(self._list())

    def load(self, name: str, allocate: Allocate) -> Loaded:
        """Read a checkpoint into the tensors that ``allocate(skeleton)`` makes (see ``state.flat.allocate``).

        Raises DamagedError when anything is missing or differs from its checksum; the tensors then hold no valid state.
        Raises OtherFormatError for one that this version cannot read.
        """
        manifest = self._read_manifest(name)
        try:
            skeleton = self._read_skeleton(manifest)
            tensors = allocate(skeleton)
            # The skeleton is read again with its part, to verify the checksum of the whole part.
            stream = ByteStream([memoryview(bytearray(len(skeleton))), *map(tensor_bytes, tensors)])
            if stream.num_bytes != manifest.num_bytes:
                raise DamagedError(name, f"it holds {manifest.num_bytes} bytes, but its state has {stream.num_bytes}")
            self._read_parts(manifest, stream)
        except MissingObjectError as error:
            raise DamagedError(name, error.key + " is missing", is_missing=True) from error
        return Loaded(manifest, skeleton, tensors)

    def load_newest(
        self, allocate: Allocate, *, lineage: int | None = None, known: StoredCheckpoint | None = None
    ) -> Found:
        """Read the newest of the job's checkpoints that is whole; damaged ones are skipped.

        ``lineage``: that of a cold start; no checkpoint that is older than its fence is missed. If nothing is found,
        there is no checkpoint and ``allocate`` was not called, or all are damaged and the tensors that it made hold no
        valid state. ``known`` is one that the job has stored.

        Raises LostCheckpointError if the storage shows nothing as new as ``known``, or no whole checkpoint and only
        missing objects; OtherFormatError for a checkpoint that this version cannot read.
        """
        tried: list[CheckpointId] | None = None
        skipped: list[DamagedCheckpoint] = []
        fence = fence_key(lineage) if lineage else None
        while (checkpoints := self._ancestry(listing := self._list(showing=fence))) != tried:
            if known and not listing.shows(known):
                raise LostCheckpointError(self._objects.url, known, max(listing.found, default=None))
            tried, skipped, are_missing = checkpoints, [], True
            for checkpoint in checkpoints:
                try:
                    return Found(self.load(checkpoint.name, allocate), tuple(skipped))
                except DamagedError as error:
                    skipped.append(DamagedCheckpoint(name=error.name, reason=error.reason))
                    self._found_damaged.add(error.name)
                    are_missing = are_missing and error.is_missing
            if known and skipped and are_missing:
                raise LostCheckpointError(self._objects.url, known, None)
            # Meanwhile a member that was cut off may have stored newer ones and deleted these.
        return Found(None, tuple(skipped))

    def prune(self, keep: int, *, lineage: int) -> list[CheckpointId]:
        """Delete all but the newest ``keep`` complete checkpoints, and older incomplete ones; return what was deleted.

        The newest complete one is always kept, and so is anything newer, or of another format. ``lineage`` is that of
        the caller: raises LineageFencedError, and deletes nothing, if there is a newer one, whose members may be
        loading any of these.
        """
        listing = self._list_unfenced(lineage)
        complete = self._complete(listing)
        old = outdated(complete, listing.found - self._of_other_format, keep)
        for checkpoint in old:
            # Without its manifest it no longer exists, even if the rest is not deleted.
            self._objects.delete([manifest_key(checkpoint.name)])
            self._objects.delete_folder(f"{FOLDER}{checkpoint.name}/")
        oldest = min(complete[: max(keep, 1)], default=None)
        ended = [number for number in listing.lineages if oldest and number < oldest.lineage]
        self._objects.delete([key for n in ended for key in (fence_key(n), start_key(n)) if key in listing.sizes])
        return old

    def put_file(self, key: str, path: Path) -> None:
        """Store a file, such as the final model, over what is there."""
        self._objects.upload(key, path)

    def _list(self, *, showing: str | None = None) -> _Listing:
        """List what there is; with all that was written before the object ``showing``, even if listings lag behind."""
        for _ in range(_LISTINGS):
            sizes = self._objects.sizes(FOLDER)
            if showing is None or showing in sizes:
                return _Listing(sizes)
        raise StorageError(
            f"list {FOLDER} in {self._objects.url}",
            "it does not list an object that was just written",
            "check that the storage is healthy",
            transient=True,
        )

    def _list_unfenced(self, lineage: int) -> _Listing:
        listing = self._list()
        newest = max(listing.lineages, default=lineage)
        if newest > lineage:
            raise LineageFencedError(self._objects.url, lineage, newest)
        return listing

    def _ancestry(self, listing: _Listing) -> list[CheckpointId]:
        bases = {lineage: self._base(lineage, listing) for lineage in listing.starts}
        return list(ancestry(listing.with_manifest, bases))

    def _base(self, lineage: int, listing: _Listing) -> CheckpointId | None:
        try:
            start = self.read_start(lineage)
            return start.base if start else None
        except DamagedError:  # anything older may be what it began with
            return max((older for older in listing.with_manifest if older.lineage < lineage), default=None)

    def _complete(self, listing: _Listing) -> list[CheckpointId]:
        return [one for one in self._ancestry(listing) if self._is_complete(one, listing.sizes)]

    def _is_complete(self, checkpoint: CheckpointId, sizes: Mapping[str, int]) -> bool:
        name = checkpoint.name
        if name in self._found_damaged:
            return False
        try:
            manifest = self._read_manifest(name)
        except DamagedError:
            return False
        except OtherFormatError:
            self._of_other_format.add(checkpoint)
            return False
        return all(sizes.get(part_key(name, part.number)) == part.num_bytes for part in manifest.parts)

    def _read_manifest(self, name: str) -> Manifest:
        key = manifest_key(name)
        try:
            content = self._objects.read(key)
            check_format(key, content, own=FORMAT)
            manifest = Manifest.model_validate_json(content)
        except MissingObjectError:
            raise DamagedError(name, "its manifest is missing", is_missing=True) from None
        except ValidationError as error:
            raise DamagedError(name, f"its manifest is not readable ({_first_fault(error)})") from error
        if manifest.checkpoint.name != name:
            raise DamagedError(name, f"its manifest is that of {manifest.checkpoint.name}")
        return manifest

    def _read_skeleton(self, manifest: Manifest) -> bytes:
        name = manifest.checkpoint.name
        for _ in range(_ATTEMPTS):
            skeleton = b""
            for part in manifest.parts:
                wanted = min(part.num_bytes, manifest.skeleton.num_bytes - len(skeleton))
                if wanted:
                    self._check_size(name, part)
                    skeleton += self._objects.read_range(part_key(name, part.number), 0, wanted)
            if hashlib.sha256(skeleton).hexdigest() == manifest.skeleton.sha256:
                return skeleton
        raise DamagedError(name, "the checksum of its skeleton is wrong")

    def _read_parts(self, manifest: Manifest, stream: ByteStream[memoryview]) -> None:
        name = manifest.checkpoint.name
        bounds = pairwise(accumulate((part.num_bytes for part in manifest.parts), initial=0))
        with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-read") as pool:
            reads = [
                pool.submit(self._read_part, name, part, stream, start)
                for part, (start, _) in zip(manifest.parts, bounds, strict=True)
            ]
            try:
                for read in reads:
                    read.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _read_part(self, name: str, part: PartInfo, stream: ByteStream[memoryview], start: int) -> None:
        """Read one part to its place in ``stream``, at ``start``; again if it arrives damaged."""
        self._check_size(name, part)
        for _ in range(_ATTEMPTS):
            sha = hashlib.sha256()
            for offset in range(0, part.num_bytes, _READ_BYTES):
                stop = min(offset + _READ_BYTES, part.num_bytes)
                content = self._objects.read_range(part_key(name, part.number), offset, stop)
                sha.update(content)
                for view in stream.cut(start + offset, start + stop):
                    view[:], content = content[: len(view)], content[len(view) :]
            if sha.hexdigest() == part.sha256:
                return
        raise DamagedError(name, f"the checksum of part {part.number} is wrong")

    def _check_size(self, name: str, part: PartInfo) -> None:
        size = self._objects.size(part_key(name, part.number))
        if size != part.num_bytes:
            raise DamagedError(name, f"part {part.number} has {size} bytes instead of {part.num_bytes}")


def _checkpoint_of(key: str) -> CheckpointId | None:
    return CheckpointId.parse("/".join(key.removeprefix(FOLDER).split("/")[:2]))


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    return describe_fault(".".join(map(str, first["loc"])), first["msg"])


def load_agreed(
    store: CheckpointStore, *, job: str, lineage: int, allocate: Allocate, known: StoredCheckpoint | None = None
) -> tuple[Start, Loaded | None]:
    """Read the checkpoint that ``lineage`` begins with into the tensors that ``allocate(skeleton)`` makes.

    The members of a cold start agree on it here: the first that has read a complete one writes the lineage's `Start`,
    which can be written once. The others load what that names, so no member trains with another state, whichever of
    them are lost meanwhile. ``known`` is a checkpoint that the job has stored: it does not begin with less.

    Returns the decision, and the checkpoint; None if the decision is to begin without one. Then the tensors that
    ``allocate`` made, if it was called, hold no valid state. Raises DamagedError if the chosen checkpoint is damaged
    here, LineageFencedError if there is a newer lineage, StorageError when the storage fails, and as
    `CheckpointStore.load_newest`.
    """
    start, loaded = store.read_start(lineage), None
    if start is None:
        store.fence(lineage)
        loaded, skipped = store.load_newest(allocate, lineage=lineage, known=known)
        name = loaded.manifest.checkpoint.name if loaded else None
        start = store.decide_start(Start(job=job, lineage=lineage, checkpoint=name, skipped=skipped))
    if start.checkpoint is None:
        return start, None
    if loaded is None or loaded.manifest.checkpoint != start.base:
        loaded = store.load(start.checkpoint, allocate)
    return start, loaded
