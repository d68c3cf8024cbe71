"""The background thread of one worker that uploads its parts of a checkpoint while training goes on."""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from resile_shared.errors import ResileError

from .manifest import CheckpointId, DivergedError, Manifest, PartInfo
from .snapshot import Snapshot, sha256
from .store import CheckpointStore


@dataclass
class _Upload:
    """One checkpoint on its way."""

    snapshot: Snapshot
    checkpoint: CheckpointId
    wanted: list[int] = field(default_factory=list)
    stored: dict[int, PartInfo] = field(default_factory=dict)
    to_commit: tuple[PartInfo, ...] | None = None
    finished: bool = False


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
        self._at_work: _Upload | None = None
        self._stored: list[tuple[str, PartInfo]] = []
        self._committed: list[Manifest] = []
        self._error: ResileError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

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

        A part it has stored already is told again by ``stored`` instead. Clears ``error``.
        """
        with self._changed:
            upload = self._current
            if upload is None:
                return
            upload.wanted = [number for number in sorted(parts) if number not in upload.stored]
            told = [upload.stored[number] for number in sorted(parts) if number in upload.stored]
            self._stored += [(upload.checkpoint.name, part) for part in told]
            self._error = None
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
                self._error = None
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
            self._error = None
            self._changed.notify_all()

    def error(self) -> ResileError | None:
        """Return why parts of the current checkpoint were not stored, or it was not committed; None if all is well.

        The upload stops there; ``assign`` and ``commit`` try again, ``finish`` gives it up.
        """
        with self._changed:
            return self._error

    def close(self, *, wait: bool) -> None:
        """Stop: with ``wait``, after all that was assigned and is to be committed; else after the part at hand."""
        with self._changed:
            self._closing = True
            if not wait and self._current is not None:
                self._current.wanted, self._current.to_commit = [], None
            self._changed.notify_all()
        if wait:
            self._thread.join()

    def _drop(self, upload: _Upload) -> None:
        """Let go of a snapshot, unless the thread is just reading it. Called with the lock held."""
        upload.finished = True
        upload.wanted, upload.to_commit = [], None
        if upload is not self._at_work:
            upload.snapshot.release()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            error: ResileError | None = None
            try:
                work()
            except ResileError as failure:
                error = failure
            except Exception as failure:  # shown to the user by whoever asks for the error
                error = ResileError(f"saving a checkpoint failed unexpectedly: {failure!r}")
            with self._changed:
                upload, self._at_work = self._at_work, None
                if upload is not None and upload.finished:
                    upload.snapshot.release()
                elif error is not None:
                    self._error = error

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; None when it is time to stop."""
        with self._changed:
            while True:
                upload = self._current
                if upload is not None and (upload.wanted or upload.to_commit):
                    self._at_work = upload
                    return self._taken_from(upload)
                if self._closing:
                    return None
                self._changed.wait()

    def _taken_from(self, upload: _Upload) -> Callable[[], None]:
        if upload.wanted:
            number = upload.wanted.pop(0)
            return lambda: self._put(upload, number)
        parts, upload.to_commit = upload.to_commit or (), None
        return lambda: self._commit(upload, parts)

    def _put(self, upload: _Upload, number: int) -> None:
        part = self._store.put_part(upload.checkpoint.name, number, upload.snapshot.part(number))
        with self._changed:
            upload.stored[number] = part
            if not upload.finished:
                self._stored.append((upload.checkpoint.name, part))

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
            self._committed.append(manifest)
        self._store.prune(self._keep)
