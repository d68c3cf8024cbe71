"""Uploads what workers write to their output folder."""

import asyncio
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from resile_shared.errors import ResileError
from resile_shared.text import printable

from ..threads import in_thread

if TYPE_CHECKING:
    from resile_shared.storage.objects import ObjectStorage

logger = logging.getLogger(__name__)

Version = tuple[int, int]
"""When a file was changed last, in nanoseconds, and its number of bytes."""


class Outputs:
    """Uploads the output folders of jobs to ``jobs/<job>/output`` of the storage, each file again when it changes."""

    def __init__(self, storage: str) -> None:
        self._url = storage
        self._storage: ObjectStorage | None = None
        self._uploaded: defaultdict[str, dict[str, Version]] = defaultdict(dict)
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._refused: defaultdict[str, list[str]] = defaultdict(list)

    async def upload(self, job: str, folder: Path) -> bool:
        """Upload what has changed; return whether all of it is stored now. What failed is retried by the next call.

        When the caller is cancelled, the upload continues, and the next call waits for it: a large file is not begun
        again and again beside itself.
        """
        while running := self._running.get(job):
            await asyncio.wait({running})
        uploading = self._running[job] = asyncio.create_task(self._try_upload(job, folder))
        uploading.add_done_callback(lambda _: self._running.pop(job))
        return await asyncio.shield(uploading)

    async def _try_upload(self, job: str, folder: Path) -> bool:
        try:
            await in_thread(self._upload, job, folder)
        except (ResileError, OSError) as error:
            logger.warning("the output of job %s is not stored yet: %s", job, error)
            return False
        return True

    def take_refused(self, job: str) -> list[str]:
        """Return, once, which files of ``job`` can never be stored, and why: one line for each."""
        return self._refused.pop(job, [])

    def forget(self, job: str) -> None:
        """Forget a job whose output folder is removed."""
        self._uploaded.pop(job, None)
        self._refused.pop(job, None)

    def _upload(self, job: str, folder: Path) -> None:
        """Upload the files that have changed, but for those whose names no object can have."""
        from resile_shared.storage.objects import NameRefused  # loads the clients of all clouds

        uploaded = self._uploaded[job]
        for path, version in _files(folder):
            name = path.relative_to(folder).as_posix()
            if uploaded.get(name) == version:
                continue
            try:
                self._open().upload(f"jobs/{job}/output/{name}", path)
            except NameRefused as error:
                if name not in uploaded:
                    line = f"the output file {printable(name)} is not stored: {error.reason}; {error.advice}"
                    logger.warning("job %s: %s", job, line)
                    self._refused[job].append(line)
            uploaded[name] = version

    def _open(self) -> "ObjectStorage":
        if self._storage is None:
            from resile_shared.storage.objects import ObjectStorage  # loads the clients of all clouds

            self._storage = ObjectStorage(self._url)
        return self._storage


def _files(folder: Path) -> Iterator[tuple[Path, Version]]:
    """Find the regular files. Links are skipped: they could lead outside the job's folder."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, (status.st_mtime_ns, status.st_size)
