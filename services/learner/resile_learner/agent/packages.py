"""Packed folders of code: fetched from storage once, checked, and unpacked for all workers of this host."""

import asyncio
import hashlib
import logging
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Set
from pathlib import Path

from resile_shared.errors import ResileError

logger = logging.getLogger(__name__)

MAX_UNPACKED_BYTES = 8 << 30
KEEP_PACKAGES = 20
_NAME = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(rf"packages/({_NAME.pattern})\.tar\.gz")
RETRY_SECONDS = 5.0


class BrokenPackage(ResileError):
    """A package cannot be used."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"the job's package {key} cannot be used: {reason}")


class Packages:
    """The packages unpacked in ``folder``, each in a folder named by its checksum. Not to be shared by two objects."""

    def __init__(self, storage: str, folder: Path) -> None:
        for left in folder.glob(".*"):  # by a fetch that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._storage = storage
        self._folder = folder
        self._fetching: dict[str, asyncio.Task[None]] = {}

    async def fetch(self, key: str) -> Path:
        """Return the folder of a package, which is fetched if it is not here yet. Raises BrokenPackage, StorageError.

        While the storage cannot be reached, this waits.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise BrokenPackage(key, "its key is not packages/<sha256>.tar.gz")
        sha256 = match[1]
        path = self._folder / sha256
        if path.is_dir():
            os.utime(path)
            return path
        if sha256 not in self._fetching:
            fetching = asyncio.create_task(self._fetch_with_retries(key, sha256, path))
            fetching.add_done_callback(lambda _: self._fetching.pop(sha256))
            self._fetching[sha256] = fetching
        await asyncio.shield(self._fetching[sha256])  # the caller may be cancelled; others still need it
        return path

    def prune(self, in_use: Set[Path]) -> list[Path]:
        """Move the least recently used packages, beyond the number kept, aside; return where they are now."""
        unpacked = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name) and path not in in_use]
        unused = sorted(unpacked, key=lambda path: path.stat().st_mtime)[:-KEEP_PACKAGES]
        return [path.rename(path.with_name(f".{path.name}")) for path in unused]

    async def _fetch_with_retries(self, key: str, sha256: str, path: Path) -> None:
        from resile_shared.storage import StorageError  # loads the clients of all clouds

        while True:
            try:
                return await asyncio.to_thread(self._fetch, key, sha256, path)
            except StorageError as error:
                if not error.transient:
                    raise
                logger.warning("a job is waiting for its package: %s", error)
            await asyncio.sleep(RETRY_SECONDS)

    def _fetch(self, key: str, sha256: str, path: Path) -> None:
        from resile_shared.storage import MissingObjectError, ObjectStorage  # loads the clients of all clouds

        with tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as staging:
            packed, unpacked = Path(staging, "package.tar.gz"), Path(staging, "unpacked")
            try:
                ObjectStorage(self._storage).download(key, packed)
                _check(packed, sha256)
                _unpack(packed, unpacked)
                unpacked.rename(path)
            except MissingObjectError as error:
                raise BrokenPackage(key, f"it is not in the storage {self._storage}") from error
            except ResileError:
                raise
            except Exception as error:  # tarfile and zlib raise all kinds of errors on a malformed archive
                raise BrokenPackage(key, " ".join(str(error).split()) or type(error).__name__) from error


def _check(packed: Path, sha256: str) -> None:
    with packed.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != sha256:
        raise ValueError("its content does not match the checksum in its name")


def _unpack(packed: Path, folder: Path) -> None:
    """Unpack files, folders and inner links. Raises an error for anything that would reach outside ``folder``."""
    with tarfile.open(packed, "r:gz") as archive:
        total = 0
        for member in archive:
            total += member.size
            if total > MAX_UNPACKED_BYTES:
                raise ValueError(f"unpacked it is larger than {MAX_UNPACKED_BYTES >> 30} GiB")
        archive.extractall(folder, filter="data")
    folder.mkdir(exist_ok=True)


def find_script(package: Path, script: str) -> Path:
    """Return the path of a script inside a package. Raises ResileError."""
    path = package / script
    if not (path.is_file() and path.resolve().is_relative_to(package.resolve())):
        raise ResileError(f"the job's package has no script {script}")
    return path
