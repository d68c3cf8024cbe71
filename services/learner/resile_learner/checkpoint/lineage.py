"""Which checkpoints are a job's: those of its newest lineage, and what that began with, back to the first.

A *lineage* is a cold start and all generations that descend from it; their numbers rise. Members that were cut off may
go on storing after a newer cold start, but nothing descends from what they store. In the run's storage::

    checkpoints/lineage-2/fence         written before the members of lineage 2 look for a checkpoint
    checkpoints/lineage-2/start.json    which one they found; written once

The fence ends older lineages: their members store and delete nothing any more once they have seen it. One of them may
be deleting just then, by a listing from before the fence; this spares the newest complete checkpoints of that listing,
and so the one that is found after the fence. The first start of a job looks for nothing and writes neither.

Within a lineage no fence is needed. A recovery may leave members behind that do not know of it, but a round needs all
members of its generation, so they take no new checkpoint. They can still store parts of one that was begun before,
write its manifest, and prune: that checkpoint has the same bits whoever completes it, it is older than all that the
others take from then on, and pruning spares the newest. The final model is the state after the last round, which is one
for all: whichever member stores it, the bytes are the same. Everything here is pure.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from .manifest import FOLDER, CheckpointId, Stored

START_FORMAT: Final = 1
_FOLDER = re.compile(rf"{FOLDER}lineage-([1-9][0-9]{{0,8}})/")


class DamagedCheckpoint(Stored):
    """A checkpoint that could not be used, and why."""

    name: str
    reason: str


class Start(Stored):
    """Which checkpoint the members of a cold start begin with."""

    format: Literal[1] = START_FORMAT
    job: str
    lineage: int = Field(ge=1)
    checkpoint: str | None = Field(description="its name; None: there was none that is whole")
    skipped: tuple[DamagedCheckpoint, ...] = Field(default=(), description="newer ones, which were damaged")

    @property
    def base(self) -> CheckpointId | None:
        """The checkpoint, if there is one."""
        return CheckpointId.parse(self.checkpoint) if self.checkpoint else None

    @model_validator(mode="after")
    def _descends(self) -> Self:
        if self.checkpoint is not None and (self.base is None or self.base.lineage >= self.lineage):
            raise ValueError(f"a start of lineage {self.lineage} cannot begin with {self.checkpoint}")
        return self


def fence_key(lineage: int) -> str:
    """Return the key of the object that ends all lineages before ``lineage``."""
    return f"{FOLDER}lineage-{lineage}/fence"


def start_key(lineage: int) -> str:
    """Return the key of a `Start`."""
    return f"{FOLDER}lineage-{lineage}/start.json"


def lineage_of(key: str) -> int | None:
    """Return the lineage that an object belongs to; None for one that belongs to none."""
    match = _FOLDER.match(key)
    return int(match[1]) if match else None


def model_key(lineage: int) -> str:
    """Return the key of the final model of a lineage."""
    return f"models/lineage-{lineage}.safetensors"


def ancestry(found: Collection[CheckpointId], bases: Mapping[int, CheckpointId | None]) -> Iterator[CheckpointId]:
    """Yield those of ``found`` that the job has passed through, newest first.

    ``bases``: what each lineage that has chosen began with; None: with nothing. Of an older lineage only what precedes
    the checkpoint that was chosen from it counts.
    """
    newest = max((*bases, *(checkpoint.lineage for checkpoint in found)), default=0)
    in_order = sorted(found, reverse=True)
    yield from (checkpoint for checkpoint in in_order if checkpoint.lineage == newest)
    last = bases.get(newest)
    while last is not None:
        yield from (c for c in in_order if c.lineage == last.lineage and c <= last)
        last = bases.get(last.lineage)
