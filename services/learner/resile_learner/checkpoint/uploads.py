"""The background threads of one worker that upload its parts of a checkpoint while training continues.

What they do, and in which order, is decided by `UploadQueue`.
"""

import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from resile_shared.errors import ResileError
from resile_shared.storage.objects import StorageError

from .final_model import save_model
from .manifest import CheckpointId, DivergedError, Manifest, PartInfo
from .snapshot import Snapshot, sha256
from .store import CheckpointStore
from .upload_queue import Prune, PutPart, StoreModel, Task, Upload, UploadQueue, Wait, WriteManifest

NUM_THREADS = 4
"""Number of threads: one connection cannot use all bandwidth to a cloud, and checksums take as long as disk writes."""


class Uploads:
    """An `UploadQueue` whose tasks threads carry out. Every call but ``close(wait=True)`` returns at once."""

    def __init__(self, store: CheckpointStore, *, job: str, keep: int) -> None:
        """Upload to ``store``; after writing a manifest, delete all but the newest ``keep`` checkpoints."""
        self._store = store
        self._job = job
        self._keep = keep
        self._changed = threading.Condition()  # guards the queue
        self._queue = UploadQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint-upload-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def current(self) -> CheckpointId | None:
        """See `UploadQueue.current`, as for all methods below."""
        return self._queue.current

    @property
    def has_stored_model(self) -> bool:
        """Whether the final model is stored."""
        return self._queue.has_stored_model

    @property
    def error(self) -> ResileError | None:
        """The error that stopped all uploads for good."""
        return self._queue.error

    @property
    def failure(self) -> StorageError | None:
        """The last failure of the storage; None once it works again."""
        return self._queue.failure

    def fault(self, *, now: float) -> StorageError | None:
        """Return why the storage takes nothing."""
        with self._changed:
            return self._queue.fault(now=now)

    def start(self, snapshot: Snapshot, checkpoint: CheckpointId) -> CheckpointId | None:
        """Start a checkpoint, or queue it; returns the one that it replaced in the queue."""
        with self._changed:
            return self._queue.start(snapshot, checkpoint)

    def assign(self, parts: Collection[int]) -> None:
        """Set the parts of the current checkpoint that this worker stores."""
        with self._changed:
            self._queue.assign(parts)
            self._changed.notify_all()

    def stored(self) -> list[tuple[str, PartInfo]]:
        """Return the parts stored since the last call, with the names of their checkpoints."""
        with self._changed:
            return self._queue.stored()

    def commit(self, parts: Sequence[PartInfo]) -> None:
        """Write the manifest of the current checkpoint."""
        with self._changed:
            self._queue.commit(parts)
            self._changed.notify_all()

    def committed(self) -> list[Manifest]:
        """Return the manifests written since the last call."""
        with self._changed:
            return self._queue.committed()

    def finish(self, checkpoint: CheckpointId) -> None:
        """End a checkpoint."""
        with self._changed:
            self._queue.finish(checkpoint)
            self._changed.notify_all()

    def store_model(self, state_dict: Mapping[str, Any], key: str) -> None:
        """Store the final model."""
        with self._changed:
            self._queue.store_model(state_dict, key)
            self._changed.notify_all()

    def close(self, *, wait: bool) -> None:
        """Stop."""
        with self._changed:
            self._queue.close(wait=wait)
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (task := self._take()) is not None:
            result = self._carry_out(task)
            with self._changed:
                self._queue.done(task, result, now=time.monotonic())
                self._changed.notify_all()

    def _take(self) -> Task | None:
        """Wait for a task; None when it is time to stop."""
        with self._changed:
            while not self._queue.has_ended:
                task = self._queue.take(now=time.monotonic())
                if not isinstance(task, Wait):
                    return task
                self._changed.wait(task.seconds)
        return None

    def _carry_out(self, task: Task) -> PartInfo | Manifest | ResileError | None:
        try:
            return carry_out(task, self._store, job=self._job, keep=self._keep)
        except ResileError as error:
            return error
        except Exception as error:  # shown to the user by the reader of ``error``
            return ResileError(f"saving a checkpoint failed with an unexpected error: {error!r}")


def carry_out(task: Task, store: CheckpointStore, *, job: str, keep: int) -> PartInfo | Manifest | None:
    """Carry out one task of an `UploadQueue`, and return its result.

    Raises StorageError, DivergedError and LineageFencedError.
    """
    match task:
        case PutPart(upload, number):
            return store.put_part(upload.checkpoint.name, number, upload.snapshot.part(number))
        case WriteManifest():
            return _write_manifest(task, store, job)
        case Prune(lineage):
            store.prune(keep, lineage=lineage)
        case StoreModel():
            _store_model(task, store)
    return None


def _write_manifest(task: WriteManifest, store: CheckpointStore, job: str) -> Manifest:
    upload, parts = task
    for part in parts:
        if part.number not in upload.stored and not _is_held(upload, part, store):
            raise DivergedError(upload.checkpoint.name, part.number)
    manifest = Manifest.of(upload.checkpoint, job=job, parts=parts, created=datetime.now(UTC))
    store.commit(manifest)
    return manifest


def _is_held(upload: Upload, part: PartInfo, store: CheckpointStore) -> bool:
    """Whether the snapshot of ``upload`` has this part as well, which another member has stored."""
    own = upload.snapshot.part(part.number)
    return sha256(own) == part.sha256 or (
        part.number == 0 and store.put_part(upload.checkpoint.name, part.number, own) == part
    )


def _store_model(task: StoreModel, store: CheckpointStore) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="resile-") as folder:
            for path in save_model(task.state_dict, Path(folder)):
                store.put_file(str(PurePosixPath(task.key).with_suffix(path.suffix)), path)
    except OSError as error:
        advice = "free some space in the temporary folder of this host: the model is written there first"
        raise StorageError("store the final model", str(error), advice) from error
