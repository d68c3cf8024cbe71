"""When checkpoints are taken, and how the members share the work of storing one.

Every holder of a snapshot stores its share of the parts; stored parts are told in headers, so all agree on what is
missing, and after a change of membership the rest is divided anew among the holders that remain. The lowest of them
writes the manifest and tells so in a header. A storage that fails is tried again and again while training goes on; only
the end of a job waits for it.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from resile_shared.errors import ResileError, UsageError
from resile_shared.storage import StorageError

from ..checkpoint.manifest import CheckpointId, PartInfo, PartTracker
from ..checkpoint.snapshot import Snapshot
from ..checkpoint.store import CheckpointStore, Loaded, NoneWholeError
from ..checkpoint.uploads import MODEL_KEY, Uploads
from ..messages import CheckpointSaved, Warned
from .header import Header
from .session import HeldState, Session
from .state import Flat

KEPT = 2
PATIENCE_SECONDS = 600.0
"""For how long, at least, the end of a job waits for a storage that fails; see `StorageGone`."""
READ_SECONDS = 5.0
"""Between two attempts to read a checkpoint from a storage that cannot be reached."""
_UNITS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}


class Every:
    """How often a checkpoint is due: every so many iterations, or every so many seconds of the lowest rank's clock."""

    def __init__(self, every: int | str | None) -> None:
        self._iterations: int | None = None
        self._seconds: float | None = None
        if isinstance(every, str):
            self._seconds = _seconds(every)
        elif every is not None:
            if every < 1:
                raise UsageError(
                    f'checkpoint_every is {every}: use a number of iterations from 1 up, or a time such as "5 min"'
                )
            self._iterations = every
        self._begun = time.monotonic()

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint is to be taken once ``iteration`` iterations are committed."""
        if self._iterations is not None:
            return iteration % self._iterations == 0
        return self._seconds is not None and time.monotonic() - self._begun >= self._seconds

    def begin(self) -> None:
        """A checkpoint is taken now."""
        self._begun = time.monotonic()


class StorageGone(ResileError):
    """The end of a job has waited long enough for its storage.

    That is as long as the training took that is lost by giving up, the one since the newest complete checkpoint: to
    wait longer could cost more than to train it again. And never less than `PATIENCE_SECONDS`.
    """

    def __init__(self, seconds: float, trouble: StorageError) -> None:
        super().__init__(
            f"training is complete, but its end could not be stored in {seconds / 60:.0f} minutes: {trouble}; then "
            "resume from the newest checkpoint"
        )


@dataclass
class _UnderWay:
    """A checkpoint that was begun and is neither known to be complete nor given up."""

    tracker: PartTracker
    holders: tuple[int, ...]
    num_bytes: int
    begun: float


class Checkpointer:
    """One member's part in the checkpoints of a run. Without storage it does nothing."""

    def __init__(self, session: Session, *, every: int | str | None) -> None:
        self._session = session
        self._every = Every(every)
        self._enabled = session.storage is not None
        self._store_made: CheckpointStore | None = None
        self._uploads: Uploads | None = None
        self._snapshot: Snapshot | None = None
        self._under_way: dict[str, _UnderWay] = {}
        self._committing: str | None = None
        self._pause: str | None = None
        self._told_parts: list[tuple[str, PartInfo]] = []
        """Stored parts that were told in a round which may not be committed."""
        self._told_saved: list[str] = []
        self._told_dropped: list[str] = []
        self._told_holds: list[str] | None = None
        self._told_trouble = ""
        self._safe_since = time.monotonic()
        """When the state of the newest complete checkpoint was the newest, as far as this member knows."""
        self._ended_at: float | None = None
        self._stores_model = False

    @property
    def busy(self) -> bool:
        """Whether this member waits for a checkpoint, or stores the final model."""
        if self._uploads is None:
            return False
        return self._uploads.busy or (self._stores_model and not self._uploads.has_stored_model)

    @property
    def in_trouble(self) -> bool:
        """Whether the storage does not take what this member wants to store."""
        return self._uploads is not None and self._uploads.trouble() is not None

    def newest(self, state: HeldState) -> tuple[bytes, Sequence[Tensor]] | None:
        """Read the newest checkpoint of the run that is whole, waiting for a storage that cannot be reached.

        None, and ``state`` as it was, if there is none. Damaged ones are passed over, and told.
        """
        if self._session.storage is None:
            return None
        flat = state.flatten()
        untouched = [tensor.clone() for tensor in flat.tensors]
        try:
            loaded = self._read_newest(state)
        except NoneWholeError as error:
            for tensor, content in zip(flat.tensors, untouched, strict=True):
                tensor.copy_(content)
            self._warn(f"{error}: training starts over from the beginning")
            return None
        if loaded is None:
            return None
        for skipped in loaded.skipped:
            used = loaded.manifest.checkpoint.name
            self._warn(f"checkpoint {skipped.name} is damaged ({skipped.reason}); the older {used} is used")
        return loaded.skeleton, loaded.tensors

    def _read_newest(self, state: HeldState) -> Loaded | None:
        while True:
            try:
                return self._store().load_newest(state.make_room)
            except StorageError as error:
                if not error.transient:
                    raise
                self._warn(f"the job waits for its checkpoint: {error}")
                time.sleep(READ_SECONDS)

    def _warn(self, message: str) -> None:
        self._session.report(Warned(worker=self._session.view.me, message=message))

    def due(self, iteration: int) -> bool:
        """Whether to ask for a checkpoint after ``iteration``; the lowest rank's word counts."""
        return self._enabled and self._every.due(iteration)

    def begin(self, iteration: int, flat: Flat, *, pauses: bool = False) -> None:
        """Copy the state and begin to store it. ``pauses``: training stands still at it."""
        self._every.begin()
        if not self._enabled:
            return
        view = self._session.view
        checkpoint = CheckpointId(iteration, view.generation)
        if pauses:
            self._pause = checkpoint.name
        if checkpoint.name in self._under_way:
            return
        self._snapshot = Snapshot(flat, reuse=self._snapshot)
        self._under_way[checkpoint.name] = _UnderWay(
            PartTracker(checkpoint.name, self._snapshot.num_parts),
            holders=view.workers,
            num_bytes=self._snapshot.num_bytes,
            begun=time.monotonic(),
        )
        replaced = self._started().start(self._snapshot, checkpoint)
        if replaced is not None:
            del self._under_way[replaced.name]
            self._told_dropped.append(replaced.name)
        self.redivide()

    def news(self) -> dict[str, Any]:
        """What the header of each round says of checkpoints: all that was not told in a committed round."""
        if self._uploads is not None:
            self._told_parts += self._uploads.stored()
            self._told_saved += [manifest.checkpoint.name for manifest in self._uploads.committed()]
        stored = [(name, part.number, part.num_bytes, part.sha256) for name, part in self._told_parts]
        return {
            "stored": stored,
            "saved": list(self._told_saved),
            "dropped": list(self._told_dropped),
            "holds": self._told_holds,
        }

    def heard(self, headers: Sequence[Header]) -> None:
        """Take in what all members told in one committed round."""
        recovered = any(header.holds is not None for header in headers)
        if recovered:
            self._count_holders(headers)
        self._told_parts, self._told_saved, self._told_dropped, self._told_holds = [], [], [], None
        for header in headers:
            for name, number, num_bytes, sha256 in header.stored:
                if name in self._under_way:
                    self._under_way[name].tracker.add(name, PartInfo(number=number, num_bytes=num_bytes, sha256=sha256))
            for name in header.saved:
                self._finish(name)
            for name in header.dropped:
                self._drop(name)
        self._raise_errors()
        self._tell_trouble()
        if recovered:
            self.redivide()
        else:
            self._commit()

    def _count_holders(self, headers: Sequence[Header]) -> None:
        workers = self._session.view.workers
        for name, checkpoint in self._under_way.items():
            checkpoint.holders = tuple(
                worker for worker, header in zip(workers, headers, strict=True) if name in (header.holds or ())
            )

    def redivide(self) -> None:
        """Divide what is missing of the current checkpoint among the holders that are members now."""
        tracker, remaining = self._current()
        if tracker is None or self._uploads is None:
            return
        self._committing = None
        me = self._session.view.me
        if me in remaining:
            self._uploads.assign(tracker.missing(remaining.index(me), len(remaining)))
        self._commit()

    def recovered(self, *, is_behind: bool) -> None:
        """After a recovery members may not know the same of checkpoints under way: each tells all that it knows.

        ``is_behind``: this one took the state of another, and may have missed that a checkpoint was begun or is
        complete; it has no part in those any more.
        """
        while is_behind and self._uploads is not None and self._uploads.current is not None:
            self._uploads.finish(self._uploads.current)
        if is_behind:
            self._under_way = {}
        self._told_parts = [(name, part) for name, known in self._under_way.items() for part in known.tracker.parts]
        self._told_holds = list(self._under_way)
        self._committing = None

    def store_model(self, model: nn.Module) -> None:
        """At the end of training, on every member in every round: have the final model stored by the lowest rank.

        Raises StorageGone when the storage has failed for too long.
        """
        if self._session.storage is None:
            return
        now = time.monotonic()
        self._ended_at = now if self._ended_at is None else self._ended_at
        if self._session.view.rank == 0 and not self._stores_model:
            self._stores_model = True
            self._started().store_model(model.state_dict())
        trouble = self._uploads.trouble() if self._uploads else None
        patience = max(PATIENCE_SECONDS, self._ended_at - self._safe_since)
        if trouble is not None and now - self._ended_at > patience:
            raise StorageGone(patience, trouble)

    @property
    def model_key(self) -> str | None:
        """Key of the final model in the run's storage."""
        return MODEL_KEY if self._session.storage is not None else None

    def close(self) -> None:
        """Stop storing; what is incomplete stays without a manifest."""
        if self._uploads is not None:
            self._uploads.close(wait=False)

    def _store(self) -> CheckpointStore:
        assert self._session.storage is not None
        if self._store_made is None:
            self._store_made = CheckpointStore(self._session.storage)
        return self._store_made

    def _started(self) -> Uploads:
        if self._uploads is None:
            self._uploads = Uploads(self._store(), job=self._session.job, keep=KEPT)
        return self._uploads

    def _current(self) -> tuple[PartTracker | None, list[int]]:
        """The tracker of the current checkpoint, and its holders that are still members."""
        current = self._uploads.current if self._uploads else None
        if current is None:
            return None, []
        members = self._session.view.workers
        known = self._under_way[current.name]
        return known.tracker, [worker for worker in known.holders if worker in members]

    def _commit(self) -> None:
        """Have the manifest written if all parts are stored and this is the lowest holder."""
        tracker, remaining = self._current()
        if tracker is None or self._uploads is None or not tracker.complete or tracker.name == self._committing:
            return
        if remaining[:1] == [self._session.view.me]:
            self._committing = tracker.name
            self._uploads.commit(tracker.parts)

    def _finish(self, name: str) -> None:
        checkpoint = CheckpointId.parse(name)
        if self._uploads is None or checkpoint is None or name not in self._under_way:
            return
        known = self._under_way[name]
        self._safe_since = max(self._safe_since, known.begun)
        _, remaining = self._current()
        if remaining[:1] == [self._session.view.me]:
            saved = CheckpointSaved(
                worker=self._session.view.me,
                iteration=checkpoint.iteration,
                generation=checkpoint.generation,
                num_bytes=known.num_bytes,
                pausing=name == self._pause,
            )
            self._session.report(saved)
        self._end(checkpoint)

    def _drop(self, name: str) -> None:
        """Give up what another member has given up: one that was busy with an older checkpoint than this one knew."""
        checkpoint = CheckpointId.parse(name)
        if self._uploads is not None and checkpoint is not None and name in self._under_way:
            self._end(checkpoint)

    def _end(self, checkpoint: CheckpointId) -> None:
        assert self._uploads is not None
        self._uploads.finish(checkpoint)
        del self._under_way[checkpoint.name]
        self.redivide()

    def _raise_errors(self) -> None:
        error = self._uploads.error() if self._uploads else None
        if error is not None:
            raise error

    def _tell_trouble(self) -> None:
        """Say once of each checkpoint, and of the model, that the storage does not take it."""
        trouble = self._uploads.trouble() if self._uploads else None
        if trouble is None or self._uploads is None:
            return
        current = self._uploads.current
        if current is not None:
            what = f"checkpoint {current.name} is not stored yet"
        else:
            what = "the final model is not stored yet" if self._stores_model else "old checkpoints are not deleted yet"
        goes_on = "training goes on"
        if self._pause is not None or self._ended_at is not None:
            goes_on = "training has ended, and the job waits for it"
        told = f"{what} in {self._session.storage}: {trouble.reason}; {trouble.advice} ({goes_on})"
        if told != self._told_trouble:
            self._told_trouble = told
            self._warn(told)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    unit = _UNITS.get(match.group(2)) or _UNITS.get(match.group(2).removesuffix("s")) if match else None
    if match is None or unit is None or float(match.group(1)) == 0:
        raise UsageError(
            f'checkpoint_every is {text!r}: use a number of iterations, or a time such as "30 s", "5 min" or "1 h"'
        )
    return float(match.group(1)) * unit
