"""The fixed binary tree in which gradients are summed, whatever the membership, and what each rank adds up of it.

Its leaves are the shards 0..n-1 of one global batch; a node over [lo, hi) splits in the middle. A worker computes a
contiguous range of leaves and folds the complete subtrees inside it; who holds which subtree changes with the number
of workers, the order of additions never does.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Interval(NamedTuple):
    """A node of the tree: the leaves lo..hi-1."""

    lo: int
    hi: int


class Fold(NamedTuple):
    """Add the value at index ``right`` to the one at index ``left``."""

    left: int
    right: int


def ranges(num_leaves: int, num_workers: int) -> tuple[Interval, ...]:
    """The contiguous range of leaves of each rank; sizes differ by at most one, and are 0 for ranks left without."""
    cuts = [num_leaves * rank // num_workers for rank in range(num_workers + 1)]
    return tuple(Interval(lo, hi) for lo, hi in pairwise(cuts))


@lru_cache(maxsize=4096)
def pieces(num_leaves: int, held: Interval) -> tuple[Interval, ...]:
    """The maximal subtrees of the tree over ``num_leaves`` leaves that lie inside ``held``, left to right."""

    def inside(node: Interval) -> tuple[Interval, ...]:
        if node.hi <= held.lo or held.hi <= node.lo:
            return ()
        if held.lo <= node.lo and node.hi <= held.hi:
            return (node,)
        left, right = children(node)
        return inside(left) + inside(right)

    return inside(Interval(0, num_leaves)) if num_leaves and held.lo < held.hi else ()


def children(node: Interval) -> tuple[Interval, Interval]:
    """The two halves of an inner node; the left one is the larger when they differ."""
    middle = node.lo + (node.hi - node.lo + 1) // 2
    return Interval(node.lo, middle), Interval(middle, node.hi)


@lru_cache(maxsize=4096)
def folds(num_leaves: int, subtrees: tuple[Interval, ...]) -> tuple[Fold, ...]:
    """The additions that can be made with the subtrees in ``subtrees`` (left to right) alone.

    If they cover the tree, these turn them into the root, at index 0; else into as few complete subtrees as possible.
    """
    program: list[Fold] = []

    def fold(node: Interval, inside: Sequence[int]) -> int | None:
        """The index of the sum over ``node``, of which ``inside`` are parts; None if others are needed."""
        if not inside or subtrees[inside[0]] == node:
            return inside[0] if inside else None
        halves = children(node)
        left, right = (
            fold(half, [index for index in inside if half.lo <= subtrees[index].lo < half.hi]) for half in halves
        )
        if left is None or right is None:
            return None
        program.append(Fold(left, right))
        return left

    fold(Interval(0, num_leaves), range(len(subtrees)))
    return tuple(program)


def merges_after(num_leaves: int, leaf: int, piece: Interval) -> int:
    """How many folds inside ``piece`` become possible once ``leaf`` is complete, when leaves complete left to right."""

    def count(node: Interval) -> int:
        if node.hi - node.lo == 1:
            return 0
        left, right = children(node)
        if leaf < left.hi:
            return count(left)
        return count(right) + (1 if leaf == node.hi - 1 else 0)

    return count(piece)


def fold_values(num_leaves: int, subtrees: Sequence[Interval], values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Fold plain values in tree order; ``values[i]`` belongs to the subtree ``subtrees[i]``."""
    partial = list(values)
    for left, right in folds(num_leaves, tuple(subtrees)):
        partial[left] = add(partial[left], partial[right])
    return partial[0]


class Step(NamedTuple):
    """Add the value of source ``right`` to that of source ``left``, which then stands for both."""

    left: int
    right: int
    result: int | None
    """Index of the result that this step completes; None if it completes none."""


class Folding(NamedTuple):
    """The pieces that a rank has of a block, how it adds them up, and which subtrees that leaves."""

    counts: tuple[int, ...]
    """Number of pieces that come from each rank."""
    first: tuple[int, ...]
    """For each rank, the number of pieces that come from the ranks before it."""
    sources: tuple[tuple[int, int], ...]
    """For each piece, in the order of the leaves: the rank that it comes from, and its number among that rank's."""
    steps: tuple[Step, ...]
    unchanged: tuple[tuple[int, int], ...]
    """(source, result) for each source that is a result as it is."""
    results: tuple[Interval, ...]
    """The complete subtrees that remain, left to right: the whole tree, if the pieces cover it."""
    kept_in: tuple[int, ...]
    """For each result, the source that holds it when the pieces are folded in place: its first one."""


@lru_cache(maxsize=4096)
def folding(num_leaves: int, held: tuple[tuple[Interval, ...], ...]) -> Folding:
    """How to add up the subtrees ``held``, by rank."""
    pieces = sorted((node, rank, number) for rank, nodes in enumerate(held) for number, node in enumerate(nodes))
    subtrees = tuple(node for node, _, _ in pieces)
    program = folds(num_leaves, subtrees)
    consumed = {fold.right for fold in program}
    remaining = [index for index in range(len(subtrees)) if index not in consumed]
    last = {fold.left: number for number, fold in enumerate(program)}
    result_of = {last[index]: result for result, index in enumerate(remaining) if index in last}
    counts = tuple(map(len, held))
    return Folding(
        counts=counts,
        first=tuple(accumulate(counts, initial=0))[:-1],
        sources=tuple((rank, number) for _, rank, number in pieces),
        steps=tuple(Step(*fold, result_of.get(number)) for number, fold in enumerate(program)),
        unchanged=tuple((index, result) for result, index in enumerate(remaining) if index not in last),
        results=tuple(_span(subtrees, index, remaining) for index in remaining),
        kept_in=tuple(remaining),
    )


def _span(subtrees: Sequence[Interval], index: int, remaining: Sequence[int]) -> Interval:
    """The leaves of the subtrees that were added to that at ``index``: those up to the next one that remains."""
    following = [other for other in remaining if other > index]
    return Interval(subtrees[index].lo, subtrees[(following[0] if following else len(subtrees)) - 1].hi)
