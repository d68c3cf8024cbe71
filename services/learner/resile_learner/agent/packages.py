"""Packages of code: fetched from storage once, and unpacked for each job of this host.

Each job has a folder of its own, since its script may write there. Only the archive is kept for the next job, and its
checksum is compared at each use: no job runs what another one wrote.
"""

import asyncio
import hashlib
import logging
import re
import shutil
import tempfile
from pathlib import Path

from resile_shared.errors import ResileError
from resile_shared.folders import remove_tree
from resile_shared.storage.archives import InvalidArchive, unpack_again, unpack_archive

logger = logging.getLogger(__name__)

MAX_UNPACKED_BYTES = 8 << 30
KEEP_PACKAGES = 20
SMALL_BYTES = 1 << 20
"""A package of up to this many bytes that was unpacked here before is unpacked without a process of its own."""
_NAME = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(rf"packages/({_NAME.pattern})\.tar\.gz")
RETRY_SECONDS = 5.0


class BrokenPackage(ResileError):
    """A package cannot be used."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"the job's package {key} cannot be used: {reason}")


class Packages:
    """The archives kept in ``folder``, each named by its checksum. Not to be shared by two objects."""

    def __init__(self, storage: str, folder: Path) -> None:
        for left in folder.glob(".*"):  # by a process that was killed
            remove_tree(left)
        self._storage = storage
        self._folder = folder
        self._unpacked: set[str] = set()
        """The checksums of the packages in ``folder`` that this object has unpacked."""
        self._unpacking: dict[Path, asyncio.Task[None]] = {}

    async def unpack(self, key: str, folder: Path) -> None:
        """Unpack a package into ``folder``, on the same file system, unless that exists.

        While the storage cannot be reached, this waits. Raises BrokenPackage, StorageError.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise BrokenPackage(key, "its key is not packages/<sha256>.tar.gz")
        if unpacking := self._start(key, match[1], folder):
            await asyncio.shield(unpacking)  # the caller may be cancelled; others still need it

    async def unpack_kept(self, key: str, folder: Path) -> None:
        """Unpack a package as `unpack` does, if its archive is kept here. Raises BrokenPackage if not."""
        match = _KEY.fullmatch(key)
        if match is None or not (self._folder / match[1]).is_file():
            raise BrokenPackage(key, "it is not kept on this host")
        await self.unpack(key, folder)

    def _start(self, key: str, sha256: str, folder: Path) -> "asyncio.Task[None] | None":
        """Return the task that unpacks ``folder``; None if that is complete."""
        if folder.is_dir():
            return None
        if folder not in self._unpacking:
            unpacking = asyncio.create_task(self._unpack(key, sha256, folder))
            unpacking.add_done_callback(lambda _: self._unpacking.pop(folder))
            self._unpacking[folder] = unpacking
        return self._unpacking[folder]

    async def _unpack(self, key: str, sha256: str, folder: Path) -> None:
        staging = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
        try:
            packed, unpacked = staging / "package.tar.gz", staging / "unpacked"
            if not await asyncio.to_thread(self._copy_kept, sha256, packed):
                await self._download_with_retries(key, packed)
                if await asyncio.to_thread(_digest, packed) != sha256:
                    raise BrokenPackage(key, "its content does not match the checksum in its name")
            is_harmless = sha256 in self._unpacked and packed.stat().st_size <= SMALL_BYTES
            unpack = unpack_again if is_harmless else unpack_archive
            await unpack(packed, unpacked, max_bytes=MAX_UNPACKED_BYTES)
            self._unpacked.add(sha256)
            unpacked.rename(folder)
            self._keep(packed, sha256)
        except InvalidArchive as error:
            raise BrokenPackage(key, str(error)) from error
        finally:
            await asyncio.to_thread(remove_tree, staging)

    def _copy_kept(self, sha256: str, packed: Path) -> bool:
        """Copy the archive that is kept to ``packed``; return whether there is one, unchanged."""
        kept = self._folder / sha256
        if not kept.is_file():
            return False
        shutil.copyfile(kept, packed)
        if _digest(packed) == sha256:
            return True
        logger.warning("package %s was changed on this host, fetching it again", sha256)
        return False

    def _keep(self, packed: Path, sha256: str) -> None:
        """Keep an archive; remove the least recently used ones beyond the number kept."""
        packed.rename(self._folder / sha256)
        kept = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        for path in sorted(kept, key=lambda path: path.stat().st_mtime)[:-KEEP_PACKAGES]:
            path.unlink()
            self._unpacked.discard(path.name)

    async def _download_with_retries(self, key: str, packed: Path) -> None:
        from resile_shared.storage.objects import MissingObjectError, StorageError  # loads the clients of all clouds

        while True:
            try:
                return await asyncio.to_thread(self._download, key, packed)
            except MissingObjectError as error:
                raise BrokenPackage(key, f"it is not in the storage {self._storage}") from error
            except StorageError as error:
                if not error.transient:
                    raise
                logger.warning("a job is waiting for its package: %s", error)
            await asyncio.sleep(RETRY_SECONDS)

    def _download(self, key: str, packed: Path) -> None:
        from resile_shared.storage.objects import ObjectStorage  # loads the clients of all clouds

        ObjectStorage(self._storage).download(key, packed)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_script(package: Path, script: str) -> Path:
    """Return the path of a script inside a package. Raises ResileError."""
    path = package / script
    if not (path.is_file() and path.resolve().is_relative_to(package.resolve())):
        raise ResileError(f"the job's package has no script {script}")
    return path
