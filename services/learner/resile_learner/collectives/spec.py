"""What a gradient exchange is asked to do, whatever carries its frames, and how it fails."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from resile_shared.errors import ResileError, UsageError

from .tree import Interval


class Tag(NamedTuple):
    """Identifies a round. Frames of an older tag are discarded; those of a newer one wait unread on their link."""

    generation: int
    round: int  # increases by one with every round of a job, training and validation alike


@dataclass(frozen=True)
class RoundSpec:
    """What one round sums, over which members, and in which order."""

    tag: Tag
    members: tuple[int, ...]
    """Worker ids in rank order."""
    pieces: tuple[tuple[Interval, ...], ...]
    """For each rank the complete subtrees that it holds, left to right; together they cover leaves 0..num_leaves-1."""
    num_leaves: int
    partials: Sequence[Sequence[Tensor]]
    """[bucket][own piece]: flat contiguous tensors, those of a bucket of one dtype and length. Used as scratch."""
    sums: Sequence[Tensor]
    """[bucket]: where the sum over all leaves is written. May be ``partials[bucket][0]`` itself."""
    maxima: Container[int] = ()
    """The buckets, of integers, of which the greatest values count instead of the sums."""

    def without_sums(self) -> "RoundSpec":
        """The same round, for headers alone."""
        return replace(self, partials=(), sums=(), maxima=())


class OtherRound(UsageError):
    """Other members compute something else in the same round."""

    def __init__(self, who: str) -> None:
        super().__init__(
            f"{who} computed something else in this round: the workers did not end training (stop(), or `break`) at "
            "the same iteration, or did not all call the model, run its backward pass, or use a large output of it. "
            "Decide it by what is equal on all workers, such as the loop's loss or iteration, and "
            "not by the time, the rank, or the loss of one batch; what it is compared with, such as the best score so "
            "far, belongs into state={...} of the training call, for workers that join"
        )


class Abandoned(ResileError):
    """A round or a state transfer ended without a result because ``suspect`` did not take part in it to the end.

    ``is_hearsay``: another member or thread reported that; this worker did not see it itself.
    """

    def __init__(self, suspect: int, reason: str, *, is_hearsay: bool = False) -> None:
        super().__init__(f"worker {suspect} was lost during an exchange: {reason}")
        self.suspect = suspect
        self.reason = reason
        self.is_hearsay = is_hearsay


class Repeated(Abandoned):
    """A round ended without a result on all members, and no member was lost: all repeat it in another way."""

    def __init__(self, failed: Sequence[int]) -> None:
        super().__init__(failed[0], "its device did not complete the round")
