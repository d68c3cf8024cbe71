"""How a bucket is summed on devices: who sends which part of which piece to whom, and what each rank adds up.

A bucket is cut into one span for each rank, all of the same length so that one all-gather collects their sums, and a
tail that is too short for that. A rank folds its own span, and every rank folds the tail for itself. Nothing here adds:
the order of additions is that of `tree.folds`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..tree import Fold, Interval, folds

SPAN_ELEMENTS = 16
"""The length of a span is a multiple of this number of elements, since kernels read whole vectors."""
MIN_SPAN_BYTES = 4096
"""Buckets whose spans would be shorter consist of a tail alone: for them only the number of steps counts."""


class Span(NamedTuple):
    """The elements start..stop-1 of a bucket."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Part(NamedTuple):
    """A part of one piece that travels: of ``span`` of the bucket, to or from ``peer``.

    ``row`` and ``column`` say where it lies in the receiver's rows, ``piece`` which of the sender's pieces it is.
    """

    peer: int
    piece: int
    span: Span
    row: int
    column: int


@dataclass(frozen=True)
class BucketPlan:
    """The sum of one bucket as one rank sees it.

    Its rows are the pieces of all ranks in the order of the leaves; a row holds this rank's span, then the tail.
    """

    num_rows: int
    num_columns: int
    own: Span
    """The span that this rank folds for all ranks."""
    gathered: Span
    """The spans of all ranks together."""
    tail: Span
    kept: tuple[Part, ...]
    """Parts of this rank's own pieces that it folds itself."""
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    """Parts to receive. What one rank sends another has the same order in ``sends`` there and ``receives`` here."""
    folds: tuple[Fold, ...]
    """Additions of rows; the sum is in row 0 after them."""


@lru_cache(maxsize=256)
def plan_bucket(
    pieces: tuple[tuple[Interval, ...], ...], num_leaves: int, length: int, element_bytes: int, rank: int
) -> BucketPlan:
    """Plan the sum of a bucket of ``length`` elements, of which each rank holds partial sums for its ``pieces``."""
    num_ranks = len(pieces)
    counts = tuple(map(len, pieces))
    width = length // num_ranks // SPAN_ELEMENTS * SPAN_ELEMENTS
    if width * element_bytes < MIN_SPAN_BYTES:
        width = 0
    spans = [Span(width * other, width * (other + 1)) for other in range(num_ranks)]
    tail = Span(width * num_ranks, length)

    def parts(sender: int, receiver: int, peer: int) -> list[Part]:
        first = sum(counts[:sender])
        return [
            Part(peer, piece, span, first + piece, column)
            for piece in range(counts[sender])
            for span, column in ((spans[receiver], 0), (tail, width))
            if span.length
        ]

    # Each rank starts with its right neighbour, so that not everyone sends to the same one first.
    others = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    return BucketPlan(
        num_rows=sum(counts),
        num_columns=width + tail.length,
        own=spans[rank],
        gathered=Span(0, width * num_ranks),
        tail=tail,
        kept=tuple(parts(rank, rank, rank)),
        sends=tuple(part for other in others for part in parts(rank, other, other)),
        receives=tuple(part for other in reversed(others) for part in parts(other, rank, other)),
        folds=folds(num_leaves, tuple(node for held in pieces for node in held)),
    )
