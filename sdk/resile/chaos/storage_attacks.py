"""Attacks on storage: damaged checkpoints, and a full disk."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from resile_learner.checkpoint.manifest import FOLDER, CheckpointId, Manifest, PartInfo, manifest_key, part_key
from resile_shared.errors import UsageError
from resile_shared.storage.objects import MissingObjectError, ObjectStorage

from .attacks import AttackKind

BALLAST = ".chaos-ballast"
_MANIFEST = manifest_key("").removeprefix(FOLDER)  # "/manifest.json"


def folder_of(url: str, attack: AttackKind) -> Path:
    """Return the folder of a storage. Raises UsageError if it is none on this machine."""
    if not url.startswith("file:"):
        raise UsageError(
            f"{attack}: {url} is not a folder on this machine: use a file:// storage with a file system of its own"
        )
    return Path(unquote(urlsplit(url).path))


def fill_file(folder: Path) -> Path:
    """Return the file with which to fill the disk of ``folder``. Raises UsageError if it shares its file system."""
    if not os.path.ismount(folder):
        raise UsageError(
            f"disk-full: {folder} shares its file system with other data: give it one of its own before the pool "
            "starts, as in `mount -t tmpfs -o size=64m none DIR`; `resile up --storage file://DIR` stores there"
        )
    return folder / BALLAST


@dataclass(frozen=True)
class Damage:
    """The iteration of the checkpoint that was damaged, and how."""

    iteration: int
    text: str


class Checkpoints:
    """The checkpoints of one job. Calls block, and raise StorageError."""

    def __init__(self, storage: str, job: str) -> None:
        self._objects = ObjectStorage(f"{storage.rstrip('/')}/jobs/{job}")
        self._job = job

    def corrupt(self, rng: Random) -> Damage:
        """Damage a part of the newest checkpoint or of an older one; return which. One intact checkpoint is left.

        Raises UsageError when there are fewer than two that are intact.
        """
        intact = self._intact()
        if len(intact) < 2:
            raise UsageError(
                f"corrupt: {self._job} has {len(intact)} intact checkpoint(s), and the last one is never "
                "damaged: wait for the next one"
            )
        victim = rng.choice(intact)
        part = rng.choice(victim.parts)
        key = part_key(victim.checkpoint.name, part.number)
        content = bytearray(self._objects.read(key))
        if rng.random() < 0.5:
            place = rng.randrange(len(content))
            content[place] ^= 1 << rng.randrange(8)
            how = f"bit flipped in byte {place}"
        else:
            del content[len(content) // 2 :]
            how = f"cut off after {len(content)} bytes"
        self._objects.put(key, [bytes(content)])
        age = "newest" if victim is intact[0] else "older"
        text = f"{age} checkpoint {victim.checkpoint.name}, part {part.number}: {how}"
        return Damage(victim.checkpoint.iteration, text)

    def torn(self) -> list[int]:
        """Return the iterations of the checkpoints that have a manifest, but not every part as it says."""
        names = [key.removeprefix(FOLDER).removesuffix(_MANIFEST) for key in self._objects.sizes(FOLDER)]
        known = [found for name in names if CheckpointId.parse(name) and (found := self._manifest(name))]
        broken = [manifest for manifest in known if not self._is_intact(manifest)]
        # The manifest of a checkpoint is deleted before its parts.
        return [m.checkpoint.iteration for m in broken if self._manifest(m.checkpoint.name) is not None]

    def _intact(self) -> list[Manifest]:
        """Return the checkpoints that could be loaded, newest first."""
        from resile_learner.checkpoint.store import CheckpointStore  # imports torch, which takes seconds

        complete = CheckpointStore(self._objects.url).complete()
        return [manifest for one in complete if (manifest := self._manifest(one.name)) and self._is_intact(manifest)]

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return Manifest.model_validate_json(self._objects.read(manifest_key(name)))
        except (MissingObjectError, ValidationError):
            return None

    def _is_intact(self, manifest: Manifest) -> bool:
        return all(self._digest(manifest.checkpoint.name, part) == part.sha256 for part in manifest.parts)

    def _digest(self, name: str, part: PartInfo) -> str:
        try:
            return hashlib.sha256(self._objects.read(part_key(name, part.number))).hexdigest()
        except MissingObjectError:
            return ""
