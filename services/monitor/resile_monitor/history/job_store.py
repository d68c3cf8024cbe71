"""Keeps a value for each job in a bucket, so that it outlasts the messages from which it was computed, and restarts.

Any number of monitors may do this. All of them compute the same value from the same messages, and a write names the
revision that it replaces, so whichever comes first is right. The scheduler removes the values of a deleted job with
everything else, and so does each monitor that may have stored one afterwards.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from resile_shared.bus.buckets import Bucket, ConflictError, Entry, UnreadableError
from resile_shared.bus.connection import StoreFailed
from resile_shared.errors import MessageTooLarge
from resile_shared.messages.message import Derived

from ..projection import Projection

logger = logging.getLogger(__name__)

STORE_SECONDS = 30.0
CLOSE_SECONDS = 3.0
MAX_UNRECORDED = 20
"""A job that has a value but never had a record counts as deleted after this many checks."""

V = TypeVar("V")
M = TypeVar("M", bound=Derived)


@dataclass
class Kept(Generic[V]):
    """The value of one job in memory."""

    value: V
    revision: int = 0
    """The revision of the stored value; 0: none is stored, or it is not known."""
    is_dirty: bool = False
    num_unrecorded: int = 0
    """The number of checks in a row in which its job had no record."""


class JobStore(Generic[V, M]):
    """The values of jobs, in memory (``kept``) and in the bucket."""

    def __init__(
        self, bucket: Bucket[M], projection: Projection, *, load: Callable[[M | None], V], dump: Callable[[V, int], M]
    ) -> None:
        self._bucket = bucket
        self._projection = projection
        self._load = load
        self._dump = dump
        self.kept: dict[str, Kept[V]] = {}
        self._recorded: set[str] = set()
        """Jobs in memory that have had a record: once it is gone, they count as deleted."""

    async def get(self, job: str) -> Kept[V]:
        """Return the value of a job, and keep it in memory. Waits while NATS is disconnected."""
        if job not in self.kept:
            entry = await self.read(job)
            self.put(job, entry)
        return self.kept[job]

    def put(self, job: str, entry: Entry[M] | None) -> None:
        """Load the stored value into memory, unless a newer one is there."""
        self.kept.setdefault(job, Kept(self._load(entry.value if entry else None), entry.revision if entry else 0))

    async def read(self, job: str) -> Entry[M] | None:
        """Return the stored value of a job, or None if there is none or it cannot be read."""
        try:
            return await self._bucket.get(job)
        except UnreadableError as error:
            logger.error("%s", error)
            return None

    async def store(self, sequence: int, *, is_needed: Callable[[V], bool]) -> bool:
        """Store the values that have changed, as of ``sequence``; return whether all of them are stored.

        Values of deleted jobs are removed. A value that has not changed since then leaves memory unless needed.
        """
        is_complete = True
        for job, kept in list(self.kept.items()):
            if self._projection.record(job) is None:
                await self._on_unrecorded(job, kept)
                continue
            self._recorded.add(job)
            try:
                if kept.is_dirty:
                    await self._write(job, kept, sequence)
                elif not is_needed(kept.value):
                    self._forget(job)
            except (StoreFailed, MessageTooLarge) as error:
                logger.warning("value not stored bucket=%s job=%s: %s", self._bucket.name, job, error)
            is_complete &= not kept.is_dirty
        return is_complete

    async def _write(self, job: str, kept: Kept[V], sequence: int) -> None:
        message = self._dump(kept.value, sequence)
        kept.is_dirty = False
        try:
            kept.revision, is_stored = await write_newer(self._bucket, job, message, revision=kept.revision)
        except BaseException:
            kept.is_dirty = True
            raise
        kept.is_dirty |= not is_stored

    def _forget(self, job: str) -> None:
        del self.kept[job]
        self._recorded.discard(job)

    async def _on_unrecorded(self, job: str, kept: Kept[V]) -> None:
        """Remove the value of a deleted job; the record of a new job may still arrive."""
        kept.num_unrecorded += 1
        if job in self._recorded or kept.num_unrecorded > MAX_UNRECORDED:
            await self._remove(job)

    async def _remove(self, job: str) -> None:
        """Remove the value that this or another monitor has stored after the scheduler removed the job."""
        self._forget(job)
        try:
            entry = await self._bucket.get(job)
            revision = entry.revision if entry else 0
        except UnreadableError as error:
            revision = error.revision
        if revision:
            with suppress(ConflictError):
                await self._bucket.delete(job, revision=revision)


async def write_newer(bucket: Bucket[M], key: str, message: M, *, revision: int) -> tuple[int, bool]:
    """Replace the value that has ``revision``; return the revision to replace next, and whether ``message`` is stored.

    If another monitor was first, its value is as good if it is of the same sequence or a later one. A value that cannot
    be read is replaced.
    """
    try:
        if revision:
            return await bucket.update(key, message, revision=revision), True
        return await bucket.create(key, message), True
    except ConflictError:
        try:
            entry = await bucket.get(key)
        except UnreadableError as error:
            return error.revision, False
        return (entry.revision, entry.value.sequence >= message.sequence) if entry else (0, False)


async def store_regularly(store: Callable[[], Awaitable[None]]) -> None:
    """Call ``store`` regularly until cancelled, then a last time, unless that takes long."""
    try:
        while True:
            await asyncio.sleep(STORE_SECONDS)
            await store()
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await store()
