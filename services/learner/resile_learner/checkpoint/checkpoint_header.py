"""What a member reports about checkpoints in the header of each round."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from .manifest import PartInfo


class StoredPart(NamedTuple):
    """A part of a checkpoint that is in storage."""

    checkpoint: str
    part: PartInfo


class PauseProgress(IntEnum):
    """How far a member knows the state at which training is paused to be stored."""

    UNKNOWN = 0
    STORING = 1  # it has a snapshot
    STORED = 2


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """One member's reports; those of rounds that were abandoned are repeated."""

    stored: Sequence[StoredPart] = ()
    """Parts that the member has stored."""
    saved: Sequence[str] = ()
    """Names of the checkpoints whose manifest the member has written."""
    dropped: Sequence[str] = ()
    """Names of the checkpoints that the member has given up for newer ones."""
    held: Sequence[str] | None = None
    """After a recovery: names of the unfinished checkpoints that the member has a snapshot of."""
    is_due: bool = False
    """Whether a checkpoint is due by the member's clock; that of the lowest rank counts."""
    is_busy: bool = False
    """Whether the member is waiting for a checkpoint, or storing the final model."""
    pause: PauseProgress | None = None
    """How far the state of the pause is stored; None while training is not paused."""

    def to_json(self) -> list[Any] | None:
        """Return the fields as JSON values; None if there is nothing to report."""
        is_empty = not (self.stored or self.saved or self.dropped or self.is_due or self.is_busy)
        if is_empty and self.held is None and self.pause is None:
            return None
        stored = [(name, part.number, part.num_bytes, part.sha256) for name, part in self.stored]
        return [stored, self.saved, self.dropped, self.held, self.is_due, self.is_busy, self.pause]

    @staticmethod
    def from_json(fields: list[Any] | None) -> "CheckpointHeader":
        """Read what `to_json` returned."""
        if fields is None:
            return NOTHING
        stored, saved, dropped, held, is_due, is_busy, pause = fields
        parts = [
            StoredPart(name, PartInfo(number=number, num_bytes=num_bytes, sha256=sha256))
            for name, number, num_bytes, sha256 in stored
        ]
        progress = None if pause is None else PauseProgress(pause)
        return CheckpointHeader(parts, saved, dropped, held, is_due, is_busy, progress)


NOTHING = CheckpointHeader()
