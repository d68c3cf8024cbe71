"""The checkpoints of one run in object storage: written part by part, completed by a manifest, verified when read."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from torch import Tensor

from resile_shared.errors import ResileError
from resile_shared.storage import MissingObjectError, ObjectStorage

from ..state.flat import Allocate
from ..state.memory import ByteStream, tensor_bytes
from .manifest import FOLDER, CheckpointId, Manifest, PartInfo, manifest_key, outdated, part_key
from .snapshot import sha256

_READ_BYTES = 8 * 2**20
_READERS = 4  # with _READ_BYTES, what loading needs beside the tensors: 32 MiB


class DamagedError(ResileError):
    """A checkpoint has a manifest, but its parts are missing or differ from it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"checkpoint {name} is damaged: {reason}; use an older one")
        self.name = name
        self.reason = reason


class Skipped(NamedTuple):
    """A checkpoint that could not be used, and why."""

    name: str
    reason: str


class NoneWholeError(ResileError):
    """There are checkpoints, and all of them are damaged."""

    def __init__(self, url: str, skipped: Sequence[Skipped]) -> None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
        super().__init__(f"every checkpoint in {url} is damaged ({reasons})")


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
    skipped: tuple[Skipped, ...] = ()
    """Newer checkpoints that were damaged."""


class CheckpointStore:
    """The checkpoints, and a few other files, of the run whose storage is ``url``.

    Calls block; any thread may call. All raise StorageError (see ``resile_shared.storage``) when the storage fails.
    """

    def __init__(self, url: str) -> None:
        self._objects = ObjectStorage(url)
        self._found_damaged: set[str] = set()

    def put_part(self, name: str, number: int, buffers: Sequence[memoryview]) -> PartInfo:
        """Store one part of checkpoint ``name``. Storing it twice is harmless: the bytes are the same."""
        part = PartInfo(number=number, num_bytes=sum(map(len, buffers)), sha256=sha256(buffers))
        self._objects.put(part_key(name, number), buffers)
        return part

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest, once all parts are stored. Returns False if it exists already, with the same bits.

        Raises TakenError if there is one with other bits, DamagedError if the object there is not a manifest.
        """
        name = manifest.checkpoint.name
        if self._objects.create(manifest_key(name), manifest.model_dump_json(indent=1).encode()):
            return True
        if self._read_manifest(name).digest != manifest.digest:
            raise TakenError(name)
        return False

    def complete(self) -> list[CheckpointId]:
        """List the checkpoints that have a well-formed manifest and all parts in their sizes, newest first.

        Those that this store has read before and found damaged are left out.
        """
        sizes = self._objects.sizes(FOLDER)
        return [checkpoint for checkpoint in _with_manifest(sizes) if self._is_complete(checkpoint.name, sizes)]

    def load(self, name: str, allocate: Allocate) -> Loaded:
        """Read a checkpoint into the tensors that ``allocate(skeleton)`` makes (see ``state.flat.allocate``).

        Raises DamagedError when anything is missing or differs from its checksum; the tensors then hold no valid state.
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
            raise DamagedError(name, error.key + " is missing") from error
        return Loaded(manifest, skeleton, tensors)

    def load_newest(self, allocate: Allocate) -> Loaded | None:
        """Read the newest checkpoint that is whole; None, and nothing touched, if there is none at all.

        Damaged ones are skipped and listed in the result. Raises NoneWholeError if there are only damaged ones; the
        tensors that ``allocate`` made then hold no valid state.
        """
        skipped: list[Skipped] = []
        for checkpoint in _with_manifest(self._objects.sizes(FOLDER)):
            try:
                loaded = self.load(checkpoint.name, allocate)
            except DamagedError as error:
                skipped.append(Skipped(error.name, error.reason))
                self._found_damaged.add(error.name)
            else:
                return Loaded(loaded.manifest, loaded.skeleton, loaded.tensors, tuple(skipped))
        if skipped:
            raise NoneWholeError(self._objects.url, skipped)
        return None

    def prune(self, keep: int) -> list[CheckpointId]:
        """Delete all but the newest ``keep`` complete checkpoints, and older incomplete ones; return what was deleted.

        The newest complete one is always kept, and so is anything newer.
        """
        found = {checkpoint for key in self._objects.sizes(FOLDER) if (checkpoint := _checkpoint_of(key))}
        old = outdated(self.complete(), found, keep)
        for checkpoint in old:
            # Without its manifest it no longer exists, even if the rest is not deleted.
            self._objects.delete([manifest_key(checkpoint.name)])
            self._objects.delete_folder(f"{FOLDER}{checkpoint.name}/")
        return old

    def put_file(self, key: str, path: Path) -> None:
        """Store a file, such as the final model, over what is there."""
        self._objects.upload(key, path)

    def _is_complete(self, name: str, sizes: Mapping[str, int]) -> bool:
        if name in self._found_damaged:
            return False
        try:
            manifest = self._read_manifest(name)
        except DamagedError:
            return False
        return all(sizes.get(part_key(name, part.number)) == part.num_bytes for part in manifest.parts)

    def _read_manifest(self, name: str) -> Manifest:
        try:
            manifest = Manifest.model_validate_json(self._objects.read(manifest_key(name)))
        except MissingObjectError:
            raise DamagedError(name, "its manifest is missing") from None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DamagedError(name, f"its manifest is not readable ({place}: {first['msg']})") from error
        if manifest.checkpoint.name != name:
            raise DamagedError(name, f"its manifest is that of {manifest.checkpoint.name}")
        return manifest

    def _read_skeleton(self, manifest: Manifest) -> bytes:
        name = manifest.checkpoint.name
        skeleton = b""
        for part in manifest.parts:
            wanted = min(part.num_bytes, manifest.skeleton.num_bytes - len(skeleton))
            if wanted:
                self._check_size(name, part)
                skeleton += self._objects.read_range(part_key(name, part.number), 0, wanted)
        if hashlib.sha256(skeleton).hexdigest() != manifest.skeleton.sha256:
            raise DamagedError(name, "the checksum of its skeleton is wrong")
        return skeleton

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
        """Read one part to its place in ``stream``, at ``start``."""
        self._check_size(name, part)
        sha = hashlib.sha256()
        for offset in range(0, part.num_bytes, _READ_BYTES):
            stop = min(offset + _READ_BYTES, part.num_bytes)
            content = self._objects.read_range(part_key(name, part.number), offset, stop)
            sha.update(content)
            for view in stream.cut(start + offset, start + stop):
                view[:], content = content[: len(view)], content[len(view) :]
        if sha.hexdigest() != part.sha256:
            raise DamagedError(name, f"the checksum of part {part.number} is wrong")

    def _check_size(self, name: str, part: PartInfo) -> None:
        size = self._objects.size(part_key(name, part.number))
        if size != part.num_bytes:
            raise DamagedError(name, f"part {part.number} has {size} bytes instead of {part.num_bytes}")


def _with_manifest(keys: Iterable[str]) -> list[CheckpointId]:
    """Pick the checkpoints whose manifest is among ``keys``, newest first."""
    found = {_checkpoint_of(key) for key in keys if key.endswith("/manifest.json")}
    return sorted((checkpoint for checkpoint in found if checkpoint), reverse=True)


def _checkpoint_of(key: str) -> CheckpointId | None:
    return CheckpointId.parse(key.removeprefix(FOLDER).partition("/")[0])
