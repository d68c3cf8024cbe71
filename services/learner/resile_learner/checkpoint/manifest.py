"""What a checkpoint is: numbered parts of one stream of bytes, and a manifest that makes them a checkpoint.

The stream is the skeleton of the state (see ``state.flat``) and its tensors, back to back. Part 0 is the skeleton
(older versions cut the stream regardless of where it ends). In the run's storage::

    checkpoints/lineage-1/000000001200-g3/part-00000
    checkpoints/lineage-1/000000001200-g3/part-00001
    checkpoints/lineage-1/000000001200-g3/manifest.json     written last, and only if there is none

A checkpoint without a manifest does not exist. Everything here is pure.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from resile_shared.errors import ResileError
from resile_shared.version import VERSION

FOLDER = "checkpoints/"
FORMAT: Final = 2
"""The format of manifests that this version writes, and the only one that it reads."""

_NAME = re.compile(r"lineage-([1-9][0-9]{0,8})/([0-9]{12,18})-g([0-9]{1,9})")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class CheckpointId(NamedTuple):
    """The boundary at which a checkpoint was taken, with its generation and lineage. The newest is the greatest.

    The lineage decides first: what follows a cold start is newer than all that the members before it stored.
    """

    lineage: int
    iteration: int
    generation: int

    @property
    def name(self) -> str:
        """Its name in storage: ``lineage-1/000000001200-g3``."""
        return f"lineage-{self.lineage}/{self.iteration:012d}-g{self.generation}"

    @classmethod
    def parse(cls, name: str) -> "CheckpointId | None":
        """Read a name; None if it is not one."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2]), int(match[3])) if match else None


def part_key(name: str, number: int) -> str:
    """Return the key of one part."""
    return f"{FOLDER}{name}/part-{number:05d}"


def manifest_key(name: str) -> str:
    """Return the key of the manifest."""
    return f"{FOLDER}{name}/manifest.json"


def is_manifest_key(key: str) -> bool:
    """Whether it is the key of a manifest, and so there is a checkpoint."""
    return key == manifest_key(key.removeprefix(FOLDER).removesuffix("/manifest.json"))


class Stored(BaseModel):
    """A document in storage."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PartInfo(Stored):
    """One part as it is stored."""

    number: int = Field(ge=0)
    num_bytes: int = Field(ge=1)
    sha256: Sha256


class SkeletonInfo(Stored):
    """The first bytes of the stream."""

    num_bytes: int = Field(ge=1)
    sha256: Sha256


class Manifest(Stored):
    """Makes a checkpoint complete, and describes how to verify it."""

    format: Literal[2] = FORMAT
    job: str
    lineage: int = Field(ge=1)
    generation: int = Field(ge=0)
    iteration: int = Field(ge=0)
    digest: Sha256 = Field(description="sha256 over the parts' sha256 (as hex text) in order: which bits this is")
    skeleton: SkeletonInfo
    parts: tuple[PartInfo, ...] = Field(min_length=1)
    num_bytes: int
    created: AwareDatetime

    @classmethod
    def of(cls, checkpoint: CheckpointId, *, job: str, parts: Iterable[PartInfo], created: datetime) -> Self:
        """Describe the checkpoint that was stored as ``parts``."""
        in_order = tuple(sorted(parts, key=lambda part: part.number))
        return cls(
            job=job,
            lineage=checkpoint.lineage,
            generation=checkpoint.generation,
            iteration=checkpoint.iteration,
            digest=digest(in_order),
            skeleton=SkeletonInfo(num_bytes=in_order[0].num_bytes, sha256=in_order[0].sha256),
            parts=in_order,
            num_bytes=sum(part.num_bytes for part in in_order),
            created=created,
        )

    @property
    def checkpoint(self) -> CheckpointId:
        """Which checkpoint this is the manifest of."""
        return CheckpointId(self.lineage, self.iteration, self.generation)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if [part.number for part in self.parts] != list(range(len(self.parts))):
            raise ValueError("its parts are not numbered 0, 1, 2, ...")
        if self.num_bytes != sum(part.num_bytes for part in self.parts) or self.skeleton.num_bytes > self.num_bytes:
            raise ValueError("its sizes do not add up")
        if self.digest != digest(self.parts):
            raise ValueError("its digest is not that of its parts")
        return self


def digest(parts: Iterable[PartInfo]) -> str:
    """Compute the digest of a checkpoint from its parts in order."""
    return hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()


class OtherFormatError(ResileError):
    """An object in storage has the format of another version of Resile: it is neither read nor deleted."""

    def __init__(self, key: str, found: int, own: int) -> None:
        super().__init__(
            f"{key} has format {found}, and Resile {VERSION} reads format {own}: use the version of Resile that stored "
            "it, or start the job anew"
        )


def check_format(key: str, content: bytes, *, own: int) -> None:
    """Raise OtherFormatError if ``content`` is a document of another format than ``own``.

    What is not a document at all is left to whoever reads it.
    """
    try:
        document = json.loads(content)
    except ValueError:
        return
    found = document.get("format") if isinstance(document, dict) else None
    if isinstance(found, int) and found != own:
        raise OtherFormatError(key, found, own)


class DivergedError(ResileError):
    """Two members hold different states of one checkpoint."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(
            f"checkpoint {name} was not saved: members have different bytes in part {number}, so their states "
            "differ. Look for randomness, time or the worker's own name in the state of the job"
        )


class PartTracker:
    """Which parts of one checkpoint are stored, as the members report.

    Every member keeps one and feeds it the same reports, so all agree on what is missing.
    """

    def __init__(self, name: str, num_parts: int) -> None:
        self.name = name
        self._num_parts = num_parts
        self._stored: dict[int, PartInfo] = {}

    def add(self, name: str, part: PartInfo) -> None:
        """Record a stored part, if it is of this checkpoint. Raises DivergedError when two reports of a part differ."""
        if name != self.name:
            return
        if part.number >= self._num_parts or self._stored.setdefault(part.number, part) != part:
            raise DivergedError(name, part.number)

    def missing(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the missing parts that ``rank`` of the ``num_ranks`` members with a snapshot stores.

        Part k belongs to rank k mod num_ranks.
        """
        return tuple(number for number in range(rank, self._num_parts, num_ranks) if number not in self._stored)

    @property
    def complete(self) -> bool:
        """Whether every part is stored."""
        return len(self._stored) == self._num_parts

    @property
    def parts(self) -> tuple[PartInfo, ...]:
        """The stored parts in order."""
        return tuple(self._stored[number] for number in sorted(self._stored))


def outdated(complete: Collection[CheckpointId], found: Collection[CheckpointId], keep: int) -> list[CheckpointId]:
    """Choose what to delete, oldest first: all but the newest ``keep`` complete checkpoints.

    ``found`` are all checkpoints with any object in storage. The newest complete one is always kept, and so are newer
    incomplete ones: they may be being stored.
    """
    if not complete:
        return []
    kept = sorted(complete)[-max(keep, 1) :]
    return [
        checkpoint for checkpoint in sorted({*found, *complete}) if checkpoint not in kept and checkpoint < kept[-1]
    ]
