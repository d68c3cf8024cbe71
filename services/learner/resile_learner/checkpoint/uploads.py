"""The background threads of one worker that upload its parts of a checkpoint while training goes on.

What the storage does not take is tried again, for as long as it is wanted: the trouble is told, and training goes on.
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
"""At work at once: one connection does not fill the way to a cloud, and checksums take as long as writing to a disk."""
MODEL_KEY = "model.safetensors"
FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 15.0
"""Before what failed is tried again; each time twice as long, up to the second."""


@dataclass
class _Upload:
    """One checkpoint on its way."""

    snapshot: Snapshot
    checkpoint: CheckpointId
    wanted: list[int] = field(default_factory=list)
    stored: dict[int, PartInfo] = field(default_factory=dict)
    to_commit: tuple[PartInfo, ...] | None = None
    num_readers: int = 0
    finished: bool = False


class _Work(NamedTuple):
    """Something that one thread does; no two threads do what has the same name."""

    name: tuple[object, ...]
    run: Callable[[], None]
    upload: _Upload | None = None


class Uploads:
    """Uploads one checkpoint at a time. Every call but ``close(wait=True)`` returns at once; one thread calls.

    A checkpoint is current from ``start`` until ``finish``, so that whoever holds its snapshot can take over parts of a
    member that left. Another one started meanwhile waits; a third takes the place of the one that waits. All of that
    follows from the calls alone, so members that make the same calls at the same boundaries agree on what is current.
    """

    def __init__(self, store: CheckpointStore, *, job: str, keep: int) -> None:
        """Upload to ``store``; with each manifest written here, all but the newest ``keep`` checkpoints go."""
        self._store = store
        self._job = job
        self._keep = keep
        self._changed = threading.Condition()
        self._current: _Upload | None = None
        self._waiting: _Upload | None = None
        self._under_way: set[tuple[object, ...]] = set()
        self._stored: list[tuple[str, PartInfo]] = []
        self._committed: list[Manifest] = []
        self._must_prune = False
        self._model: Mapping[str, Any] | None = None
        self._has_stored_model = False
        self._error: ResileError | None = None
        self._trouble: StorageError | None = None
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._resume_at = 0.0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint-upload-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, snapshot: Snapshot, checkpoint: CheckpointId) -> CheckpointId | None:
        """Begin a checkpoint, or let it wait for the current one; returns the one whose waiting place it took."""
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
        """The checkpoint that was started and not yet finished, whose parts are to be assigned."""
        return self._current.checkpoint if self._current else None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._current is not None

    def assign(self, parts: Collection[int]) -> None:
        """Say which parts of the current checkpoint this worker is to store; replaces what was said before.

        A part it has stored already is told again by ``stored`` instead.
        """
        with self._changed:
            upload = self._current
            if upload is None:
                return
            upload.wanted = [number for number in sorted(parts) if number not in upload.stored]
            told = [upload.stored[number] for number in sorted(parts) if number in upload.stored]
            self._stored += [(upload.checkpoint.name, part) for part in told]
            self._changed.notify_all()

    def stored(self) -> list[tuple[str, PartInfo]]:
        """Take the parts stored since the last call, with the name of their checkpoint."""
        with self._changed:
            news, self._stored = self._stored, []
            return news

    def commit(self, parts: Sequence[PartInfo]) -> None:
        """Write the manifest of the current checkpoint: all its ``parts`` are stored. Then delete old checkpoints.

        Before, the parts that others stored are compared with this worker's snapshot.
        """
        with self._changed:
            if self._current is not None:
                self._current.to_commit = tuple(parts)
                self._changed.notify_all()

    def committed(self) -> list[Manifest]:
        """Take the manifests written since the last call."""
        with self._changed:
            news, self._committed = self._committed, []
            return news

    def finish(self, checkpoint: CheckpointId) -> None:
        """End a checkpoint: its manifest exists, or it is given up. After the current one comes the one that waits."""
        with self._changed:
            if self._waiting is not None and self._waiting.checkpoint == checkpoint:
                ended, self._waiting = self._waiting, None
                self._drop(ended)
            if self._current is None or self._current.checkpoint != checkpoint:
                return
            ended, self._current, self._waiting = self._current, self._waiting, None
            self._drop(ended)
            self._trouble = None
            self._changed.notify_all()

    def store_model(self, state_dict: Mapping[str, Any]) -> None:
        """Store the final model as a safetensors file under ``MODEL_KEY``; its tensors must not change any more."""
        with self._changed:
            self._model = state_dict
            self._changed.notify_all()

    @property
    def has_stored_model(self) -> bool:
        """Whether the final model is stored."""
        with self._changed:
            return self._has_stored_model

    def trouble(self) -> StorageError | None:
        """Return what the storage said when it failed last; None once it has taken something again."""
        with self._changed:
            return self._trouble

    def error(self) -> ResileError | None:
        """Return why what was asked for can never be stored; None if all is well."""
        with self._changed:
            return self._error

    def close(self, *, wait: bool) -> None:
        """Stop: with ``wait``, after all that is wanted and that the storage takes; else after the parts at hand."""
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
        """Let go of a snapshot, unless a thread is just reading it. Called with the lock held."""
        upload.finished = True
        upload.wanted, upload.to_commit = [], None
        if not upload.num_readers:
            upload.snapshot.release()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            error: ResileError | None = None
            try:
                work.run()
            except ResileError as failure:
                error = failure
            except Exception as failure:  # shown to the user by whoever asks for the error
                error = ResileError(f"saving a checkpoint failed unexpectedly: {failure!r}")
            self._done(work, error)

    def _done(self, work: _Work, error: ResileError | None) -> None:
        with self._changed:
            self._under_way.discard(work.name)
            if work.upload is not None:
                work.upload.num_readers -= 1
                if work.upload.finished and not work.upload.num_readers:
                    work.upload.snapshot.release()
            if error is None:
                self._trouble, self._wait_seconds = None, FIRST_WAIT_SECONDS
            elif isinstance(error, StorageError):
                self._trouble = error
                self._resume_at = time.monotonic() + self._wait_seconds
                self._wait_seconds = min(2 * self._wait_seconds, MAX_WAIT_SECONDS)
            else:
                self._error = error
            self._changed.notify_all()

    def _next(self) -> _Work | None:
        """Wait for something to do; None when it is time to stop."""
        with self._changed:
            while True:
                work = None if self._error else self._wanted()
                if self._closing and (work is None or self._trouble):
                    return None
                waits = self._resume_at - time.monotonic() if work and self._trouble else 0.0
                if work and waits <= 0:
                    self._under_way.add(work.name)
                    if work.upload is not None:
                        work.upload.num_readers += 1
                    return work
                self._changed.wait(waits or None)

    def _wanted(self) -> _Work | None:
        """Find what is to be done next; it stays to be done until it has been. Called with the lock held."""
        return next((work for work in self._all_wanted() if work.name not in self._under_way), None)

    def _all_wanted(self) -> Iterator[_Work]:
        upload = self._current
        if upload is not None:
            for number in upload.wanted:
                yield _Work((upload.checkpoint, number), partial(self._put, upload, number), upload)
            if upload.to_commit is not None:
                yield _Work((upload.checkpoint,), partial(self._commit, upload, upload.to_commit), upload)
        if self._must_prune:
            yield _Work(("prune",), self._prune)
        if self._model is not None:
            yield _Work(("model",), partial(self._put_model, self._model))

    def _put(self, upload: _Upload, number: int) -> None:
        part = self._store.put_part(upload.checkpoint.name, number, upload.snapshot.part(number))
        with self._changed:
            upload.stored[number] = part
            upload.wanted = [other for other in upload.wanted if other != number]
            if not upload.finished:
                self._stored.append((upload.checkpoint.name, part))

    def _put_model(self, state_dict: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="resile-") as folder:
            path = Path(folder) / MODEL_KEY
            save_model(state_dict, path)
            self._store.put_file(MODEL_KEY, path)
        with self._changed:
            self._model, self._has_stored_model = None, True

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
            self._must_prune = True

    def _prune(self) -> None:
        with self._changed:
            self._must_prune = False  # before: what is committed meanwhile has it done again
        try:
            self._store.prune(self._keep)
        except StorageError:
            with self._changed:
                self._must_prune = True
            raise
