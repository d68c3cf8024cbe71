"""When checkpoints are taken, and how the members share the work of storing one.

Every holder of a snapshot stores its share of the parts and reports stored parts in headers, so that all members agree
on what is missing; after a change of membership the remaining holders divide the rest among themselves. The holder with
the lowest rank writes the manifest and reports that in a header. Failed uploads are retried while training continues;
only the end of a job waits for them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from resile_shared.errors import ResileError
from resile_shared.storage.objects import StorageError

from ..changes import span_of
from ..messages import ChangeTraced, CheckpointSaved, Warned
from ..session import Session
from ..state.flat import Allocate
from ..state.run import RunState
from .checkpoint_header import NOTHING, CheckpointHeader, PauseProgress, StoredPart
from .interval import CheckpointInterval
from .lineage import Start, model_key
from .manifest import CheckpointId, OtherFormatError, PartTracker
from .snapshot import Snapshot
from .store import CheckpointStore, DamagedError, Loaded, LostCheckpointError, load_agreed
from .upload_queue import UploadQueue
from .uploads import Uploads

NUM_KEPT = 2
PATIENCE_SECONDS = 600.0
"""Minimum seconds for which the end of a job waits for a storage that fails; see `StorageGone`."""
PAUSED_SECONDS = 1.0
"""Seconds between two reports that training is paused."""
RETRY_SECONDS = 5.0
"""Seconds between two attempts to read a checkpoint from a storage that cannot be reached."""


class StorageGone(ResileError):
    """The job's storage kept failing for too long after training was complete.

    The job waits for as long as it trained since its newest complete checkpoint (waiting longer could cost more than
    training that part again), but never less than `PATIENCE_SECONDS`.
    """

    def __init__(self, seconds: float, failure: StorageError) -> None:
        super().__init__(
            f"training is complete, but its result could not be stored within {seconds / 60:.0f} minutes: {failure}; "
            "then resume from the newest checkpoint"
        )


@dataclass
class _Unfinished:
    """A checkpoint that was started and is neither known to be complete nor given up."""

    checkpoint: CheckpointId
    tracker: PartTracker
    holders: tuple[int, ...]
    num_bytes: int
    started: float
    begun: float
    """When all members began to copy the state. Like the next two: for the trace, in seconds since the epoch."""
    copied: float
    stored: float | None = None
    """When all parts were stored, on the member that writes the manifest."""


class Checkpointer:
    """One member's part in the checkpoints of a run. Without storage it does nothing."""

    def __init__(
        self,
        session: Session,
        *,
        every: int | str | None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
        uploads: Callable[[CheckpointStore], Uploads | UploadQueue] | None = None,
    ) -> None:
        """Make the part of the member of ``session``.

        A test passes its own ``clock`` and ``sleep``, and ``uploads`` that return an `UploadQueue` whose tasks it
        carries out itself, without threads.
        """
        self._session = session
        self._make_uploads = uploads or self._start_uploads
        self._clock = clock or time.monotonic
        self._sleep = sleep or time.sleep
        self._interval = CheckpointInterval(every, self._clock)
        self._store = CheckpointStore(session.storage) if session.storage is not None else None
        self._uploads: Uploads | UploadQueue | None = None
        self._snapshot: Snapshot | None = None
        self._unfinished: dict[str, _Unfinished] = {}
        self._committing: str | None = None
        """The newest checkpoint whose manifest this member writes; it does so until that is written."""
        self._paused_at: int | None = None
        """The iteration at which training is paused."""
        self._last_saved: CheckpointSaved | None = None
        """Report of the newest checkpoint that this member knows to be complete."""
        self._paused_reported = 0.0
        self._unconfirmed_parts: list[StoredPart] = []
        """Like the next two: reports that no committed round has carried yet."""
        self._unconfirmed_saved: list[str] = []
        self._unconfirmed_dropped: list[str] = []
        self._held: list[str] | None = None
        """After a recovery, until reported: names of the unfinished checkpoints that this member has a snapshot of."""
        self._last_warning = ""
        self._safe_since = self._clock()
        """When the state of the newest complete checkpoint was the newest, as far as this member knows."""
        self._ended_at: float | None = None
        self._stores_model = False

    @property
    def model_key(self) -> str | None:
        """Key of the final model in the run's storage; None without storage."""
        return model_key(self._session.view.lineage) if self._store is not None else None

    @property
    def is_busy(self) -> bool:
        """Whether this member is waiting for a checkpoint, or storing the final model."""
        if self._uploads is None:
            return False
        return self._uploads.current is not None or (self._stores_model and not self._uploads.has_stored_model)

    @property
    def is_failing(self) -> bool:
        """Whether the storage fails to take what this member wants to store."""
        return self._uploads is not None and self._uploads.failure is not None

    def resume(self, state: RunState) -> bool:
        """Load the checkpoint that the members of this cold start agree on, waiting for a storage that fails.

        Returns False, with ``state`` unchanged, if they begin without one, because there is none that is whole. Raises
        LineageFencedError if a newer start of the job has begun.
        """
        if self._store is None:
            return False
        before: list[tuple[Tensor, Tensor]] = []

        def allocate(skeleton: bytes) -> Sequence[Tensor]:
            if not before:
                before.extend((tensor, tensor.clone()) for tensor in state.model_memory())
            return state.allocate_buffers(skeleton, on_host=True)

        start, loaded = self._load_agreed(self._store, allocate)
        self._report_start(start)
        if loaded is None:
            for tensor, content in before:
                tensor.copy_(content)
            return False
        state.load(loaded.skeleton, loaded.tensors)
        state.progress.pausing = False
        return True

    def _load_agreed(self, store: CheckpointStore, allocate: Allocate) -> tuple[Start, Loaded | None]:
        """Try until it succeeds: if one member never can, the scheduler starts the job again."""
        view = self._session.view
        while True:
            try:
                return load_agreed(
                    store,
                    job=self._session.job,
                    lineage=view.lineage,
                    known=self._session.stored_checkpoint,
                    allocate=allocate,
                )
            except (StorageError, DamagedError, LostCheckpointError, OtherFormatError) as error:
                self._warn(f"the job is waiting for its checkpoint: {error}")
                self._sleep(RETRY_SECONDS)

    def _report_start(self, start: Start) -> None:
        """Warn of damage, and of work that is lost."""
        for skipped in start.skipped if start.checkpoint else ():
            self._warn(f"checkpoint {skipped.name} is damaged ({skipped.reason}); the older {start.checkpoint} is used")
        if start.checkpoint is None:
            storage = self._session.storage
            what = f"there is no complete checkpoint in {storage}"
            if start.skipped:
                reasons = "; ".join(f"{skipped.name}: {skipped.reason}" for skipped in start.skipped)
                what = f"every checkpoint in {storage} is damaged ({reasons})"
            self._warn(f"{what}: training starts over from the beginning")

    def _warn(self, message: str) -> None:
        self._session.report(Warned(worker=self._session.view.me, message=message))

    def is_due(self, headers: Sequence[CheckpointHeader]) -> bool:
        """Whether all members take a checkpoint at this boundary.

        The lowest rank says when one is due. While training is paused, one is due if no member stores the state of the
        pause or knows it to be stored: those that did may be gone.
        """
        pauses = [header.pause for header in headers if header.pause is not None]
        return headers[0].is_due or (bool(pauses) and max(pauses) is PauseProgress.UNKNOWN)

    def begin(self, iteration: int, state: RunState) -> None:
        """Copy the state and start to store it."""
        self._interval.restart()
        if self._store is None:
            return
        view = self._session.view
        checkpoint = CheckpointId(view.lineage, iteration, view.generation)
        if checkpoint.name in self._unfinished:
            return
        begun = self._session.changes.now()
        self._snapshot = Snapshot(state.flatten(), reuse=self._snapshot)
        self._unfinished[checkpoint.name] = _Unfinished(
            checkpoint,
            PartTracker(checkpoint.name, self._snapshot.num_parts),
            holders=view.workers,
            num_bytes=self._snapshot.num_bytes,
            started=self._clock(),
            begun=begun,
            copied=self._session.changes.now(),
        )
        replaced = self._started(self._store).start(self._snapshot, checkpoint)
        if replaced is not None:
            del self._unfinished[replaced.name]
            self._unconfirmed_dropped.append(replaced.name)
        self.divide_parts()

    def header_fields(self, next_iteration: int | None = None, *, paused_at: int | None = None) -> CheckpointHeader:
        """What the header of a round reports; ``next_iteration`` is the number of iterations after it, if it trains.

        ``paused_at``: the iteration at which training is paused.
        """
        self._paused_at = paused_at
        if self._store is None:
            return NOTHING
        if self._uploads is not None:
            self._unconfirmed_parts += (StoredPart(*stored) for stored in self._uploads.stored())
            self._unconfirmed_saved += (manifest.checkpoint.name for manifest in self._uploads.committed())
        return CheckpointHeader(
            stored=tuple(self._unconfirmed_parts),
            saved=tuple(self._unconfirmed_saved),
            dropped=tuple(self._unconfirmed_dropped),
            held=self._held,
            is_due=next_iteration is not None and self._interval.is_due(next_iteration),
            is_busy=self.is_busy,
            pause=None if paused_at is None else self._pause_progress(paused_at),
        )

    def _pause_progress(self, iteration: int) -> PauseProgress:
        if self._last_saved is not None and self._last_saved.iteration == iteration:
            return PauseProgress.STORED
        is_storing = any(known.checkpoint.iteration == iteration for known in self._unfinished.values())
        return PauseProgress.STORING if is_storing else PauseProgress.UNKNOWN

    def on_headers(self, headers: Sequence[CheckpointHeader]) -> None:
        """Process what all members reported in one committed round."""
        has_recovered = any(header.held is not None for header in headers)
        if has_recovered:
            self._update_holders(headers)
        self._unconfirmed_parts, self._unconfirmed_saved, self._unconfirmed_dropped = [], [], []
        self._held = None
        for header in headers:
            for name, part in header.stored:
                if name in self._unfinished:
                    self._unfinished[name].tracker.add(name, part)
            for name in header.saved:
                self._finish(name)
            for name in header.dropped:
                self._end(name)
        if self._uploads is not None:
            if self._uploads.error:
                raise self._uploads.error
            self._warn_of_failure(self._uploads)
        if has_recovered:
            self.divide_parts()
        else:
            self._commit()
        self._repeat_paused(headers)

    def _repeat_paused(self, headers: Sequence[CheckpointHeader]) -> None:
        """Report that training is paused, once a second until this worker is ended: any earlier report may be lost."""
        knows = next((rank for rank, header in enumerate(headers) if header.pause is PauseProgress.STORED), None)
        if knows is None or self._last_saved is None or knows != self._session.view.rank:
            return
        if self._clock() - self._paused_reported >= PAUSED_SECONDS:
            self._report_saved(self._last_saved)

    def _report_saved(self, saved: CheckpointSaved) -> None:
        pausing = saved.iteration == self._paused_at
        if pausing:
            self._paused_reported = self._clock()
        generation = self._session.view.generation
        self._session.report(saved.model_copy(update={"generation": generation, "pausing": pausing}))

    def _update_holders(self, headers: Sequence[CheckpointHeader]) -> None:
        workers = self._session.view.workers
        for name, checkpoint in self._unfinished.items():
            checkpoint.holders = tuple(
                worker for worker, header in zip(workers, headers, strict=True) if name in (header.held or ())
            )

    def divide_parts(self) -> None:
        """Divide the missing parts of the current checkpoint among the holders that are members now."""
        tracker, remaining = self._current()
        if tracker is None or self._uploads is None:
            return
        me = self._session.view.me
        if me in remaining:
            self._uploads.assign(tracker.missing(remaining.index(me), len(remaining)))
        self._commit()

    def recovered(self, *, is_behind: bool) -> None:
        """Report all that is known here: after a recovery, members may know different things of unfinished checkpoints.

        ``is_behind``: this member received the state of another, and may have missed the start or the end of a
        checkpoint; it gives up its share of all of them.
        """
        while is_behind and self._uploads is not None and self._uploads.current is not None:
            self._uploads.finish(self._uploads.current)
        if is_behind:
            self._unfinished = {}
        self._unconfirmed_parts = [
            StoredPart(name, part) for name, known in self._unfinished.items() for part in known.tracker.parts
        ]
        self._held = list(self._unfinished)

    def store_model(self, model: nn.Module) -> None:
        """Store the final model, on the lowest rank. At the end of training every member calls this in every round.

        Raises StorageGone when the storage has failed for too long.
        """
        if self._store is None:
            return
        now = self._clock()
        self._ended_at = now if self._ended_at is None else self._ended_at
        if self._session.view.rank == 0 and not self._stores_model:
            self._stores_model = True
            self._started(self._store).store_model(model.state_dict(), model_key(self._session.view.lineage))
        failure = self._uploads.failure if self._uploads else None
        patience = max(PATIENCE_SECONDS, self._ended_at - self._safe_since)
        if failure is not None and now - self._ended_at > patience:
            raise StorageGone(patience, failure)

    def close(self) -> None:
        """Stop storing; an incomplete checkpoint stays without a manifest."""
        if self._uploads is not None:
            self._uploads.close(wait=False)

    def _started(self, store: CheckpointStore) -> Uploads | UploadQueue:
        if self._uploads is None:
            self._uploads = self._make_uploads(store)
        return self._uploads

    def _start_uploads(self, store: CheckpointStore) -> Uploads:
        return Uploads(store, job=self._session.job, keep=NUM_KEPT)

    def _current(self) -> tuple[PartTracker | None, list[int]]:
        """The tracker of the current checkpoint, and its holders that are still members."""
        current = self._uploads.current if self._uploads else None
        if current is None:
            return None, []
        members = self._session.view.workers
        known = self._unfinished[current.name]
        return known.tracker, [worker for worker in known.holders if worker in members]

    def _commit(self) -> None:
        """Write the manifest if all parts are stored and this is the lowest holder."""
        tracker, remaining = self._current()
        if tracker is None or self._uploads is None or not tracker.complete or tracker.name == self._committing:
            return
        if remaining[:1] == [self._session.view.me]:
            self._committing = tracker.name
            self._unfinished[tracker.name].stored = self._session.changes.now()
            self._uploads.commit(tracker.parts)

    def _finish(self, name: str) -> None:
        known = self._unfinished.get(name)
        if known is None:
            return
        self._safe_since = max(self._safe_since, known.started)
        self._last_saved = CheckpointSaved(
            worker=self._session.view.me,
            generation=self._session.view.generation,
            lineage=known.checkpoint.lineage,
            iteration=known.checkpoint.iteration,
            num_bytes=known.num_bytes,
        )
        _, remaining = self._current()
        if remaining[:1] == [self._session.view.me]:
            self._report_trace(known)
            self._report_saved(self._last_saved)
        self._end(name)

    def _report_trace(self, known: _Unfinished) -> None:
        """Report how long each step of a checkpoint took, for its trace."""
        now, view, iteration = self._session.changes.now(), self._session.view, known.checkpoint.iteration
        spans = [
            span_of("checkpoint", known.begun, now, iteration=iteration, bytes=known.num_bytes),
            span_of("copy state", known.begun, known.copied, parent=0),
            span_of("store parts", known.copied, known.stored or now, parent=0),
        ]
        if known.stored is not None:
            spans.append(span_of("write manifest", known.stored, now, parent=0))
        self._session.report(
            ChangeTraced(
                worker=view.me,
                generation=view.generation,
                change="checkpoint",
                pausing=iteration == self._paused_at,
                spans=tuple(spans),
            )
        )

    def _end(self, name: str) -> None:
        ended = self._unfinished.pop(name, None)
        if ended is not None and self._uploads is not None:
            self._uploads.finish(ended.checkpoint)
            self.divide_parts()

    def _warn_of_failure(self, uploads: Uploads | UploadQueue) -> None:
        """Warn once for each checkpoint, and for the model, that the storage does not take it."""
        failure = uploads.fault(now=self._clock())
        if failure is None:
            return
        if uploads.current is not None:
            what = f"checkpoint {uploads.current.name} is not stored yet"
        else:
            what = "the final model is not stored yet" if self._stores_model else "old checkpoints are not deleted yet"
        consequence = "training continues"
        if self._paused_at is not None or self._ended_at is not None:
            consequence = "training has ended, and the job is waiting for it"
        warning = f"{what} in {self._session.storage}: {failure.reason}; {failure.advice} ({consequence})"
        if warning != self._last_warning:
            self._last_warning = warning
            self._warn(warning)
