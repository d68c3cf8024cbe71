"""How the pieces of one block are added up by one rank, and which subtrees that leaves."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from .tree import Interval, folds


class Step(NamedTuple):
    """Add the value of source ``right`` to that of source ``left``, which then stands for both."""

    left: int
    right: int
    result: int | None
    """Index of the result that this step completes; None if it completes none."""


class Folding(NamedTuple):
    """The pieces that a rank has of a block, and how it adds them up."""

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
    slots = tuple(node for node, _, _ in pieces)
    program = folds(num_leaves, slots)
    consumed = {fold.right for fold in program}
    remaining = [slot for slot in range(len(slots)) if slot not in consumed]
    last = {fold.left: number for number, fold in enumerate(program)}
    result_of = {last[slot]: result for result, slot in enumerate(remaining) if slot in last}
    counts = tuple(map(len, held))
    return Folding(
        counts=counts,
        first=tuple(accumulate(counts, initial=0))[:-1],
        sources=tuple((rank, number) for _, rank, number in pieces),
        steps=tuple(Step(*fold, result_of.get(number)) for number, fold in enumerate(program)),
        unchanged=tuple((slot, result) for result, slot in enumerate(remaining) if slot not in last),
        results=tuple(_span(slots, slot, remaining) for slot in remaining),
        kept_in=tuple(remaining),
    )


def _span(slots: Sequence[Interval], slot: int, remaining: Sequence[int]) -> Interval:
    """The leaves of the slots that were added to ``slot``: those up to the next one that remains."""
    following = [other for other in remaining if other > slot]
    return Interval(slots[slot].lo, slots[(following[0] if following else len(slots)) - 1].hi)
