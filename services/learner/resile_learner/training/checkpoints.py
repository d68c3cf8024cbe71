"""When checkpoints are taken, and how the members share the work of storing one.

Every holder of a snapshot stores its share of the parts; stored parts are told in headers, so all agree on what is
missing, and after a change of membership the rest is divided anew among the holders that remain. The lowest of them
writes the manifest and tells so in a header.
"""

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from resile_shared.errors import UsageError

from ..checkpoint.manifest import CheckpointId, PartInfo, PartTracker
from ..checkpoint.model import save_model
from ..checkpoint.snapshot import Snapshot
from ..checkpoint.store import CheckpointStore
from ..checkpoint.uploads import Uploads
from ..messages import CheckpointSaved, Warned
from .header import Header
from .session import Session
from .state import Flat

MODEL_KEY = "model.safetensors"
KEPT = 2
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


class Checkpointer:
    """One member's part in the checkpoints of a run. Without storage it does nothing."""

    def __init__(self, session: Session, *, every: int | str | None) -> None:
        self._session = session
        self._every = Every(every)
        self._enabled = session.storage is not None
        self._store_made: CheckpointStore | None = None
        self._uploads: Uploads | None = None
        self._snapshot: Snapshot | None = None
        self._trackers: dict[str, PartTracker] = {}
        self._holders: dict[str, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._committing: str | None = None
        self._pause: str | None = None
        self._told_parts: list[tuple[str, PartInfo]] = []
        """Stored parts that were told in a round which may not be committed."""
        self._told_saved: list[str] = []
        self._told_dropped: list[str] = []
        self._told_holds: list[str] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was begun and its manifest is not known to exist; equal on all members that hold it."""
        return self._uploads is not None and self._uploads.busy

    def newest(self, make_room: Callable[[bytes], Sequence[Tensor]]) -> tuple[bytes, list[Tensor]] | None:
        """Read the newest complete checkpoint of the run.

        None if there is none. Damaged ones are passed over, and told.
        """
        if self._session.storage is None:
            return None
        loaded = self._store().load_newest(make_room)
        if loaded is None:
            return None
        for skipped in loaded.skipped:
            self._session.report(
                Warned(
                    worker=self._session.view.me,
                    message=f"checkpoint {skipped.name} is damaged ({skipped.reason}); an older one is used",
                )
            )
        return loaded.skeleton, list(loaded.tensors)

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
        if checkpoint.name in self._trackers:
            return
        if self._uploads is None:
            self._uploads = Uploads(self._store(), job=self._session.job, keep=KEPT)
        self._snapshot = Snapshot(flat, reuse=self._snapshot)
        self._trackers[checkpoint.name] = PartTracker(checkpoint.name, self._snapshot.num_parts)
        self._holders[checkpoint.name] = view.workers
        self._sizes[checkpoint.name] = self._snapshot.num_bytes
        replaced = self._uploads.start(self._snapshot, checkpoint)
        if replaced is not None:
            self._forget(replaced)
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
                if name in self._trackers:
                    self._trackers[name].add(name, PartInfo(number=number, num_bytes=num_bytes, sha256=sha256))
            for name in header.saved:
                self._finish(name)
            for name in header.dropped:
                self._drop(name)
        self._raise_errors()
        if recovered:
            self.redivide()
        else:
            self._commit()

    def _count_holders(self, headers: Sequence[Header]) -> None:
        workers = self._session.view.workers
        for name in self._holders:
            self._holders[name] = tuple(
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
            self._trackers, self._holders, self._sizes = {}, {}, {}
        self._told_parts = [(tracker.name, part) for tracker in self._trackers.values() for part in tracker.parts]
        self._told_holds = list(self._trackers)
        self._committing = None

    def store_model(self, model: nn.Module) -> str | None:
        """Write the final model as a safetensors file into the run's storage; return its key."""
        if self._session.storage is None:
            return None
        with tempfile.TemporaryDirectory(prefix="resile-") as folder:
            path = Path(folder) / MODEL_KEY
            save_model(model.state_dict(), path)
            self._store().put_file(MODEL_KEY, path)
        return MODEL_KEY

    def close(self) -> None:
        """Stop storing; what is incomplete stays without a manifest."""
        if self._uploads is not None:
            self._uploads.close(wait=False)

    def _store(self) -> CheckpointStore:
        assert self._session.storage is not None
        if self._store_made is None:
            self._store_made = CheckpointStore(self._session.storage)
        return self._store_made

    def _current(self) -> tuple[PartTracker | None, list[int]]:
        """The tracker of the current checkpoint, and its holders that are still members."""
        current = self._uploads.current if self._uploads else None
        if current is None:
            return None, []
        members = self._session.view.workers
        return self._trackers[current.name], [worker for worker in self._holders[current.name] if worker in members]

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
        if self._uploads is None or checkpoint is None or name not in self._trackers:
            return
        _, remaining = self._current()
        if remaining[:1] == [self._session.view.me]:
            saved = CheckpointSaved(
                worker=self._session.view.me,
                iteration=checkpoint.iteration,
                generation=checkpoint.generation,
                num_bytes=self._sizes[name],
                pausing=name == self._pause,
            )
            self._session.report(saved)
        self._uploads.finish(checkpoint)
        self._forget(checkpoint)
        self.redivide()

    def _drop(self, name: str) -> None:
        """Give up what another member has given up: one that was busy with an older checkpoint than this one knew."""
        checkpoint = CheckpointId.parse(name)
        if self._uploads is not None and checkpoint is not None and name in self._trackers:
            self._uploads.finish(checkpoint)
            self._forget(checkpoint)
            self.redivide()

    def _forget(self, checkpoint: CheckpointId) -> None:
        del self._trackers[checkpoint.name], self._holders[checkpoint.name], self._sizes[checkpoint.name]

    def _raise_errors(self) -> None:
        error = self._uploads.error() if self._uploads else None
        if error is not None:
            raise error


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    unit = _UNITS.get(match.group(2)) or _UNITS.get(match.group(2).removesuffix("s")) if match else None
    if match is None or unit is None or float(match.group(1)) == 0:
        raise UsageError(
            f'checkpoint_every is {text!r}: use a number of iterations, or a time such as "30 s", "5 min" or "1 h"'
        )
    return float(match.group(1)) * unit
