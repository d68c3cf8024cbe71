"""The fixed binary tree in which gradients are summed, whatever the membership.

Its leaves are the shards 0..n-1 of one global batch; a node over [lo, hi) splits in the middle. A worker computes a
contiguous range of leaves and folds the complete subtrees inside it; who holds which subtree changes with the number
of workers, the order of additions never does.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Interval(NamedTuple):
    """A node of the tree: the leaves lo..hi-1."""

    lo: int
    hi: int


class Fold(NamedTuple):
    """Add the value in slot ``right`` to the one in slot ``left``."""

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
def folds(num_leaves: int, slots: tuple[Interval, ...]) -> tuple[Fold, ...]:
    """The additions that can be made with the subtrees in ``slots`` (left to right) alone.

    If they cover the tree, these turn them into the root, in slot 0; else into as few complete subtrees as possible.
    """
    program: list[Fold] = []

    def fold(node: Interval, inside: Sequence[int]) -> int | None:
        """The slot that has the sum over ``node``, of which ``inside`` are parts; None if others are needed."""
        if not inside or slots[inside[0]] == node:
            return inside[0] if inside else None
        halves = children(node)
        left, right = (fold(half, [slot for slot in inside if half.lo <= slots[slot].lo < half.hi]) for half in halves)
        if left is None or right is None:
            return None
        program.append(Fold(left, right))
        return left

    fold(Interval(0, num_leaves), range(len(slots)))
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


def fold_values(num_leaves: int, slots: Sequence[Interval], values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Fold plain values in tree order; ``values[i]`` belongs to the subtree ``slots[i]``."""
    partial = list(values)
    for left, right in folds(num_leaves, tuple(slots)):
        partial[left] = add(partial[left], partial[right])
    return partial[0]
