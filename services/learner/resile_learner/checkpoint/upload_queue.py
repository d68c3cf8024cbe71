"""What the upload threads of one worker do next; pure: no threads, no clock, no storage.

A thread takes a task, carries it out, and reports how that went; `Uploads` has the threads. A task stays wanted until
it is done. When the storage fails, all tasks wait for a while, which doubles with each failure, and are tried again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from resile_shared.errors import ResileError
from resile_shared.storage.objects import StorageError

from .manifest import CheckpointId, Manifest, PartInfo
from .snapshot import Snapshot

MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
"""Maximum backoff before a retry; it starts at the minimum, and doubles after each failure."""
LATE_SECONDS = 60.0
"""After this time without an answer, a request to the storage is reported. It is not given up."""


@dataclass(eq=False)
class Upload:
    """One checkpoint being stored."""

    snapshot: Snapshot
    checkpoint: CheckpointId
    wanted: list[int] = field(default_factory=list)
    """Numbers of the parts that this worker still has to store."""
    stored: dict[int, PartInfo] = field(default_factory=dict)
    """Parts that this worker has stored, by number."""
    to_commit: tuple[PartInfo, ...] | None = None
    num_readers: int = 0
    is_finished: bool = False


class PutPart(NamedTuple):
    """Store a part; the result is its `PartInfo`."""

    upload: Upload
    number: int


class WriteManifest(NamedTuple):
    """Compare the parts that others stored with the snapshot, and write the manifest, which is the result."""

    upload: Upload
    parts: tuple[PartInfo, ...]


class Prune(NamedTuple):
    """Delete old checkpoints, as a member of ``lineage``."""

    lineage: int


@dataclass(frozen=True, eq=False)
class StoreModel:
    """Store the final model."""

    key: str
    state_dict: Mapping[str, Any]


Task = PutPart | WriteManifest | Prune | StoreModel


class Wait(NamedTuple):
    """There is nothing to do for ``seconds``; None: until something is wanted."""

    seconds: float | None


class UploadQueue:
    """Uploads one checkpoint at a time.

    A checkpoint is current from ``start`` until ``finish``, so that any holder of its snapshot can store the parts of a
    member that left. Another one started meanwhile waits; a third replaces the waiting one. All of that follows from
    the calls alone, so members that make the same calls at the same boundaries agree on what is current.
    """

    def __init__(self) -> None:
        self._current: Upload | None = None
        self._waiting: Upload | None = None
        self._running: dict[Task, float] = {}
        """What was taken, and when."""
        self._stored: list[tuple[str, PartInfo]] = []
        self._committed: list[Manifest] = []
        self._prune: Prune | None = None
        self._model: StoreModel | None = None
        self.has_stored_model = False
        """Whether the final model is stored."""
        self.error: ResileError | None = None
        """The error that stopped all uploads for good."""
        self.failure: StorageError | None = None
        """The last failure of the storage; None once it works again. What failed is retried."""
        self._backoff_seconds = MIN_BACKOFF_SECONDS
        self._retry_at = 0.0
        self._is_closing = False

    def start(self, snapshot: Snapshot, checkpoint: CheckpointId) -> CheckpointId | None:
        """Start a checkpoint, or queue it behind the current one; returns the one that it replaced in the queue."""
        upload = Upload(snapshot, checkpoint)
        if self._current is None:
            self._current = upload
            return None
        replaced, self._waiting = self._waiting, upload
        if replaced is None:
            return None
        _drop(replaced)
        return replaced.checkpoint

    @property
    def current(self) -> CheckpointId | None:
        """The checkpoint that was started and is not finished, whose parts can be assigned."""
        return self._current.checkpoint if self._current else None

    def assign(self, parts: Collection[int]) -> None:
        """Set the parts of the current checkpoint that this worker stores, replacing those assigned before.

        A part that it has already stored is returned again by ``stored`` instead.
        """
        upload = self._current
        if upload is None:
            return
        upload.wanted = [number for number in sorted(parts) if number not in upload.stored]
        again = [upload.stored[number] for number in sorted(parts) if number in upload.stored]
        self._stored += [(upload.checkpoint.name, part) for part in again]

    def stored(self) -> list[tuple[str, PartInfo]]:
        """Return the parts stored since the last call, with the names of their checkpoints."""
        stored, self._stored = self._stored, []
        return stored

    def commit(self, parts: Sequence[PartInfo]) -> None:
        """Write the manifest of the current checkpoint: all its ``parts`` are stored. Then delete old checkpoints."""
        if self._current is not None:
            self._current.to_commit = tuple(parts)

    def committed(self) -> list[Manifest]:
        """Return the manifests written since the last call."""
        committed, self._committed = self._committed, []
        return committed

    def finish(self, checkpoint: CheckpointId) -> None:
        """End a checkpoint: its manifest exists, or it was given up. The waiting one becomes current."""
        if self._waiting is not None and self._waiting.checkpoint == checkpoint:
            ended, self._waiting = self._waiting, None
            _drop(ended)
        if self._current is None or self._current.checkpoint != checkpoint:
            return
        ended, self._current, self._waiting = self._current, self._waiting, None
        _drop(ended)
        self.failure = None

    def store_model(self, state_dict: Mapping[str, Any], key: str) -> None:
        """Store the final model as a safetensors file under ``key``, and beside it for `torch.load`.

        Its tensors must not change from now on.
        """
        self._model = StoreModel(key, state_dict)

    def close(self, *, wait: bool) -> None:
        """Stop: with ``wait``, once everything is stored or the storage fails; else after the tasks that were taken."""
        self._is_closing = True
        if not wait:
            self._model = None
            if self._current is not None:
                self._current.wanted, self._current.to_commit = [], None

    @property
    def has_ended(self) -> bool:
        """Whether no task will be given out any more."""
        return self._is_closing and (self.failure is not None or self._next() is None)

    def fault(self, *, now: float) -> StorageError | None:
        """Return why the storage takes nothing, as far as is known at ``now``: it failed, or it has not answered."""
        if self.failure is not None or now - min(self._running.values(), default=now) < LATE_SECONDS:
            return self.failure
        return StorageError(
            "write", f"no answer for more than {LATE_SECONDS:g} s", "check the storage, and the network to it"
        )

    def take(self, *, now: float) -> Task | Wait:
        """Give out the next task, at ``now`` on any monotonic clock. `done` has to follow."""
        task = self._next()
        if task is None:
            return Wait(None)
        if self.failure is not None and now < self._retry_at:
            return Wait(self._retry_at - now)
        self._running[task] = now
        match task:
            case PutPart(upload) | WriteManifest(upload):
                upload.num_readers += 1
            case Prune():
                self._prune = None  # a manifest that is written meanwhile sets it again
            case StoreModel():
                pass
        return task

    def done(self, task: Task, result: PartInfo | Manifest | ResileError | None, *, now: float) -> None:
        """Record how a task went."""
        self._running.pop(task, None)
        if isinstance(task, PutPart | WriteManifest):
            task.upload.num_readers -= 1
            if task.upload.is_finished and not task.upload.num_readers:
                task.upload.snapshot.release()
        match result:
            case StorageError():
                self.failure = result
                self._retry_at = now + self._backoff_seconds
                self._backoff_seconds = min(2 * self._backoff_seconds, MAX_BACKOFF_SECONDS)
                if isinstance(task, Prune):
                    self._prune = task
            case ResileError():
                self.error = result
            case _:
                self.failure, self._backoff_seconds = None, MIN_BACKOFF_SECONDS
                self._succeed(task, result)

    def _succeed(self, task: Task, result: PartInfo | Manifest | None) -> None:
        match task, result:
            case PutPart(upload, number), PartInfo():
                upload.stored[number] = result
                upload.wanted = [other for other in upload.wanted if other != number]
                if not upload.is_finished:
                    self._stored.append((upload.checkpoint.name, result))
            case WriteManifest(upload), Manifest():
                upload.to_commit = None
                self._committed.append(result)
                self._prune = Prune(result.lineage)
            case StoreModel(), None:
                self._model, self.has_stored_model = None, True

    def _next(self) -> Task | None:
        """Return the next task that no thread carries out."""
        if self.error is not None:
            return None
        return next((task for task in self._wanted() if task not in self._running), None)

    def _wanted(self) -> Iterator[Task]:
        upload = self._current
        if upload is not None:
            for number in upload.wanted:
                yield PutPart(upload, number)
            if upload.to_commit is not None:
                yield WriteManifest(upload, upload.to_commit)
        if self._prune is not None:
            yield self._prune
        if self._model is not None:
            yield self._model


def _drop(upload: Upload) -> None:
    """Release a snapshot, unless a thread is reading it."""
    upload.is_finished = True
    upload.wanted, upload.to_commit = [], None
    if not upload.num_readers:
        upload.snapshot.release()
