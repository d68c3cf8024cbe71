import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.collectives.tree import Interval, children, fold_values, folds, merges_after, pieces, ranges

shapes = st.tuples(st.integers(0, 40), st.integers(1, 12))


def grouping(node: Interval) -> str:
    """The tree over ``node`` written with brackets."""
    if node.hi - node.lo == 1:
        return str(node.lo)
    left, right = children(node)
    return f"({grouping(left)}+{grouping(right)})"


def nodes(node: Interval) -> list[Interval]:
    """Every node of the tree over ``node``."""
    if node.hi - node.lo < 1:
        return []
    return [node] if node.hi - node.lo == 1 else [node, *(below for child in children(node) for below in nodes(child))]


@settings(deadline=None)
@given(shapes)
def test_ranges_cover_all_leaves_once_and_evenly(shape: tuple[int, int]) -> None:
    num_leaves, num_workers = shape
    held = ranges(num_leaves, num_workers)
    assert [leaf for lo, hi in held for leaf in range(lo, hi)] == list(range(num_leaves))
    sizes = [hi - lo for lo, hi in held]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(shapes)
def test_pieces_are_the_largest_nodes_of_the_tree_that_a_range_holds_whole(shape: tuple[int, int]) -> None:
    num_leaves, num_workers = shape
    for held in ranges(num_leaves, num_workers):
        found = pieces(num_leaves, held)
        assert [leaf for lo, hi in found for leaf in range(lo, hi)] == list(range(held.lo, held.hi))
        whole = [node for node in nodes(Interval(0, num_leaves)) if held.lo <= node.lo and node.hi <= held.hi]
        assert set(found) <= set(whole)
        assert not any(set(children(node)) <= set(found) for node in whole if node.hi - node.lo > 1)


@settings(deadline=None)
@given(shapes)
def test_the_order_of_additions_is_the_same_whatever_the_number_of_workers(shape: tuple[int, int]) -> None:
    num_leaves, num_workers = shape
    if not num_leaves:
        return
    slots = [node for held in ranges(num_leaves, num_workers) for node in pieces(num_leaves, held)]
    folded = fold_values(num_leaves, slots, [grouping(node) for node in slots], lambda a, b: f"({a}+{b})")
    assert folded == grouping(Interval(0, num_leaves))


@settings(deadline=None)
@given(shapes)
def test_folding_uses_each_slot_once_and_ends_in_the_first(shape: tuple[int, int]) -> None:
    num_leaves, num_workers = shape
    slots = tuple(node for held in ranges(num_leaves, num_workers) for node in pieces(num_leaves, held))
    program = folds(num_leaves, slots)
    assert sorted(right for _, right in program) == list(range(1, len(slots)))


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 8, 24])
def test_merging_as_leaves_arrive_gives_the_grouping_of_the_tree(num_leaves: int) -> None:
    piece = Interval(0, num_leaves)
    stack: list[str] = []
    for leaf in range(num_leaves):
        stack.append(str(leaf))
        for _ in range(merges_after(num_leaves, leaf, piece)):
            right = stack.pop()
            stack[-1] = f"({stack[-1]}+{right})"
    assert stack == [grouping(piece)]


def test_no_leaves_need_no_folding() -> None:
    assert folds(0, ()) == ()
    assert pieces(0, Interval(0, 0)) == ()
