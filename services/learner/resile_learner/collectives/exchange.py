"""The gradient exchange as the training loop sees it, whatever carries it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from resile_shared.errors import ResileError

from .tree import Interval


class Tag(NamedTuple):
    """Names one exchange. Frames of an older tag are discarded; those of a newer one wait unread on their link."""

    generation: int
    round: int  # rises by one with every exchange of a job, training and validation alike
    attempt: int  # rises when an abandoned round is done again


@dataclass(frozen=True)
class RoundSpec:
    """What one exchange sums, over whom, and in which order."""

    tag: Tag
    members: tuple[int, ...]
    """Worker ids in rank order."""
    pieces: tuple[tuple[Interval, ...], ...]
    """For each rank the complete subtrees that it holds, left to right; together they cover leaves 0..num_leaves-1."""
    num_leaves: int
    partials: Sequence[Sequence[Tensor]]
    """[bucket][own piece]: flat contiguous CPU tensors, in a bucket of one dtype and length. Used as scratch."""
    sums: Sequence[Tensor]
    """[bucket]: where the sum over all leaves is written. May be ``partials[bucket][0]`` itself."""


class Abandoned(ResileError):
    """A round ended without a result because ``suspect`` did not take part in it to the end.

    ``is_hearsay``: that is not what this worker saw itself, but what another member or thread said.
    """

    def __init__(self, suspect: int, reason: str, *, is_hearsay: bool = False) -> None:
        super().__init__(f"worker {suspect} was lost during an exchange: {reason}")
        self.suspect = suspect
        self.reason = reason
        self.is_hearsay = is_hearsay


class OpenRound(Protocol):
    """An exchange under way."""

    def push(self, bucket: int) -> None:
        """Say that this worker's partial sums of ``bucket`` are final, and move what can move without waiting.

        Buckets are pushed in order, 0 first. Called from gradient hooks while the backward pass goes on.
        """

    def finish(self, header: bytes) -> tuple[bytes, ...]:
        """Send ``header`` to every member, wait until all sums are final, and return all headers by rank.

        Every bucket must have been pushed. Raises Abandoned when a member is lost or gives up.
        """

    @property
    def last(self) -> tuple[int, float]:
        """Once finished: the rank whose header came last, and the seconds for which it was the only one missing."""


class Exchange(Protocol):
    """Carries rounds between the members of a generation."""

    def begin(self, spec: RoundSpec) -> OpenRound:
        """Open the next round. At most one is open at a time."""

    def abandon(self, suspect: int, reason: str) -> None:
        """Make the open round raise Abandoned here and, told by frames, at every other member. From any thread."""
