"""The background threads of one worker that upload its parts of a checkpoint while training continues.

What the storage does not take is retried for as long as it is wanted; `Uploads.failure` is the last failure meanwhile.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from resile_shared.errors import ResileError
from resile_shared.storage import StorageError

from .manifest import CheckpointId, DivergedError, Manifest, PartInfo
from .model import save_model
from .snapshot import Snapshot, sha256
from .store import CheckpointStore

NUM_THREADS = 4
"""Threads: one connection does not use the bandwidth to a cloud, and checksums take as long as writing to a disk."""
MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
"""Backoff before a retry: doubled after each failure, from the first to the second."""


@dataclass
class _Upload:
    """One checkpoint being stored."""

    snapshot: Snapshot
    checkpoint: CheckpointId
    wanted: list[int] = field(default_factory=list)
    stored: dict[int, PartInfo] = field(default_factory=dict)
    to_commit: tuple[PartInfo, ...] | None = None
    num_readers: int = 0
    finished: bool = False


class _Task(NamedTuple):
    """What one thread does; no two threads run tasks of the same name."""

    name: tuple[object, ...]
    run: Callable[[], None]
    upload: _Upload | None = None


class Uploads:
    """Uploads one checkpoint at a time. Every call but ``close(wait=True)`` returns at once; one thread calls.

    A checkpoint is current from ``start`` until ``finish``, so that any holder of its snapshot can store the parts of a
    member that left. Another one started meanwhile waits; a third replaces the waiting one. All of that follows from
    the calls alone, so members that make the same calls at the same boundaries agree on what is current.
    """

    def __init__(self, store: CheckpointStore, *, job: str, keep: int) -> None:
        """Upload to ``store``; after writing a manifest, delete all but the newest ``keep`` checkpoints."""
        self._store = store
        self._job = job
        self._keep = keep
        self._changed = threading.Condition()
        self._current: _Upload | None = None
        self._waiting: _Upload | None = None
        self._running: set[tuple[object, ...]] = set()
        self._stored: list[tuple[str, PartInfo]] = []
        self._committed: list[Manifest] = []
        self._pruned_lineage: int | None = None
        """The lineage of the newest commit after which old checkpoints are not deleted yet."""
        self._model: tuple[str, Mapping[str, Any]] | None = None
        self.has_stored_model = False
        """Whether the final model is stored."""
        self.error: ResileError | None = None
        """What stopped all uploads for good."""
        self.failure: StorageError | None = None
        """The last failure of the storage; None once it works again. What failed is retried."""
        self._backoff_seconds = MIN_BACKOFF_SECONDS
        self._resume_at = 0.0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint-upload-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, snapshot: Snapshot, checkpoint: CheckpointId) -> CheckpointId | None:
        """Start a checkpoint, or queue it behind the current one; returns the one that it replaced in the queue."""
        upload = _Upload(snapshot, checkpoint)
        with self._changed:
            if self._current is None:
                self._current = upload
                return None
            replaced, self._waiting = self._waiting, upload
            if replaced is None:
                return None
            self._drop(replaced)
            return replaced.checkpoint

    @property
    def current(self) -> CheckpointId | None:
        """The checkpoint that was started and is not finished, whose parts can be assigned."""
        return self._current.checkpoint if self._current else None

    def assign(self, parts: Collection[int]) -> None:
        """Set the parts of the current checkpoint that this worker stores, replacing those assigned before.

        A part that it has already stored is returned again by ``stored`` instead.
        """
        with self._changed:
            upload = self._current
            if upload is None:
                return
            upload.wanted = [number for number in sorted(parts) if number not in upload.stored]
            again = [upload.stored[number] for number in sorted(parts) if number in upload.stored]
            self._stored += [(upload.checkpoint.name, part) for part in again]
            self._changed.notify_all()

    def stored(self) -> list[tuple[str, PartInfo]]:
        """Return the parts stored since the last call, with the names of their checkpoints."""
        with self._changed:
            stored, self._stored = self._stored, []
            return stored

    def commit(self, parts: Sequence[PartInfo]) -> None:
        """Write the manifest of the current checkpoint: all its ``parts`` are stored. Then delete old checkpoints.

        Before that, the parts that others stored are compared with this worker's snapshot.
        """
        with self._changed:
            if self._current is not None:
                self._current.to_commit = tuple(parts)
                self._changed.notify_all()

    def committed(self) -> list[Manifest]:
        """Return the manifests written since the last call."""
        with self._changed:
            committed, self._committed = self._committed, []
            return committed

    def finish(self, checkpoint: CheckpointId) -> None:
        """End a checkpoint: its manifest exists, or it was given up. The waiting one becomes current."""
        with self._changed:
            if self._waiting is not None and self._waiting.checkpoint == checkpoint:
                ended, self._waiting = self._waiting, None
                self._drop(ended)
            if self._current is None or self._current.checkpoint != checkpoint:
                return
            ended, self._current, self._waiting = self._current, self._waiting, None
            self._drop(ended)
            self.failure = None
            self._changed.notify_all()

    def store_model(self, state_dict: Mapping[str, Any], key: str) -> None:
        """Store the final model as a safetensors file under ``key``; its tensors must not change from now on."""
        with self._changed:
            self._model = key, state_dict
            self._changed.notify_all()

    def close(self, *, wait: bool) -> None:
        """Stop: with ``wait``, once everything is stored or the storage fails; else after the parts being uploaded."""
        with self._changed:
            self._closing = True
            if not wait:
                self._model = None
                if self._current is not None:
                    self._current.wanted, self._current.to_commit = [], None
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()

    def _drop(self, upload: _Upload) -> None:
        """Release a snapshot, unless a thread is reading it. Called with the lock held."""
        upload.finished = True
        upload.wanted, upload.to_commit = [], None
        if not upload.num_readers:
            upload.snapshot.release()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            error: ResileError | None = None
            try:
                task.run()
            except ResileError as failure:
                error = failure
            except Exception as failure:  # shown to the user by the reader of ``error``
                error = ResileError(f"saving a checkpoint failed with an unexpected error: {failure!r}")
            self._done(task, error)

    def _done(self, task: _Task, error: ResileError | None) -> None:
        with self._changed:
            self._running.discard(task.name)
            if task.upload is not None:
                task.upload.num_readers -= 1
                if task.upload.finished and not task.upload.num_readers:
                    task.upload.snapshot.release()
            if error is None:
                self.failure, self._backoff_seconds = None, MIN_BACKOFF_SECONDS
            elif isinstance(error, StorageError):
                self.failure = error
                self._resume_at = time.monotonic() + self._backoff_seconds
                self._backoff_seconds = min(2 * self._backoff_seconds, MAX_BACKOFF_SECONDS)
            else:
                self.error = error
            self._changed.notify_all()

    def _next(self) -> _Task | None:
        """Wait for a task; None when it is time to stop."""
        with self._changed:
            while True:
                task = None if self.error else self._wanted()
                if self._closing and (task is None or self.failure):
                    return None
                seconds = self._resume_at - time.monotonic() if task and self.failure else 0.0
                if task and seconds <= 0:
                    self._running.add(task.name)
                    if task.upload is not None:
                        task.upload.num_readers += 1
                    return task
                self._changed.wait(seconds or None)

    def _wanted(self) -> _Task | None:
        """Return the next task that no thread runs; it stays wanted until it is done. Called with the lock held."""
        return next((task for task in self._all_wanted() if task.name not in self._running), None)

    def _all_wanted(self) -> Iterator[_Task]:
        upload = self._current
        if upload is not None:
            for number in upload.wanted:
                yield _Task((upload.checkpoint, number), partial(self._put, upload, number), upload)
            if upload.to_commit is not None:
                yield _Task((upload.checkpoint,), partial(self._commit, upload, upload.to_commit), upload)
        if self._pruned_lineage is not None:
            yield _Task(("prune",), partial(self._prune, self._pruned_lineage))
        if self._model is not None:
            yield _Task(("model",), partial(self._put_model, *self._model))

    def _put(self, upload: _Upload, number: int) -> None:
        part = self._store.put_part(upload.checkpoint.name, number, upload.snapshot.part(number))
        with self._changed:
            upload.stored[number] = part
            upload.wanted = [other for other in upload.wanted if other != number]
            if not upload.finished:
                self._stored.append((upload.checkpoint.name, part))

    def _put_model(self, key: str, state_dict: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="resile-") as folder:
            path = Path(folder) / "model.safetensors"
            save_model(state_dict, path)
            self._store.put_file(key, path)
        with self._changed:
            self._model, self.has_stored_model = None, True

    def _commit(self, upload: _Upload, parts: tuple[PartInfo, ...]) -> None:
        for part in parts:
            if part.number not in upload.stored and sha256(upload.snapshot.part(part.number)) != part.sha256:
                raise DivergedError(upload.checkpoint.name, part.number)
        manifest = Manifest.of(
            upload.checkpoint,
            job=self._job,
            skeleton=upload.snapshot.skeleton,
            parts=parts,
            created=datetime.now(UTC),
        )
        self._store.commit(manifest)
        with self._changed:
            upload.to_commit = None
            self._committed.append(manifest)
            self._pruned_lineage = manifest.lineage

    def _prune(self, lineage: int) -> None:
        with self._changed:
            self._pruned_lineage = None  # first: a commit meanwhile sets it again
        try:
            self._store.prune(self._keep, lineage=lineage)
        except StorageError:
            with self._changed:
                self._pruned_lineage = lineage
            raise
