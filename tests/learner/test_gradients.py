import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from resile_learner.collectives.poller import LinkPoller
from resile_learner.collectives.round import LinkRounds
from resile_learner.collectives.spec import RoundSpec, Tag
from resile_learner.collectives.tree import Interval, children, ranges
from resile_learner.training.gradients import Gradients
from resile_learner.training.slots import Slots, cut_into_buckets, local_plan
from resile_shared.errors import UsageError


def tree_sum(values: list[torch.Tensor], node: Interval) -> torch.Tensor:
    """The sum as the rule states it, with nothing clever."""
    if node.hi - node.lo == 1:
        return values[node.lo]
    left, right = children(node)
    return tree_sum(values, left) + tree_sum(values, right)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.integers(1, 9), st.data())
def test_local_folding_of_any_range_gives_the_subtrees_bit_for_bit(
    num_leaves: int, size: int, data: st.DataObject
) -> None:
    held = ranges(num_leaves, size)[data.draw(st.integers(0, size - 1))]
    weight = nn.Parameter(torch.zeros(5))
    gradients = Gradients([weight])
    plan = gradients.begin(num_leaves, held)
    generator = torch.Generator().manual_seed(num_leaves)
    leaves = [torch.randn(5, generator=generator) * 10.0 ** (leaf % 7) for leaf in range(num_leaves)]
    partials = gradients.partials(plan)
    for step, leaf in zip(plan.steps, range(*held), strict=True):
        gradients.clear()
        (weight * leaves[leaf]).sum().backward()
        gradients.fold(step)
    for piece, partial in zip(plan.pieces, partials[0], strict=True):
        assert torch.equal(partial[:5], tree_sum(leaves, piece))


def run_round(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """All of an iteration's shards on one worker, through a real exchange of one."""
    parameters = list(model.parameters())
    gradients = Gradients(parameters, bucket_bytes=64)
    held = Interval(0, len(batches))
    plan = gradients.begin(len(batches), held)
    spec = RoundSpec(Tag(1, 0), (0,), (plan.pieces,), len(batches), gradients.partials(plan), gradients.sums())
    round_ = LinkRounds(LinkPoller(), worker=0).begin(spec)
    for leaf, batch in enumerate(batches):
        gradients.clear()
        if leaf == held.hi - 1:
            gradients.overlap(plan, round_.push)
        model(batch).sum().backward()
        if leaf < held.hi - 1:
            gradients.fold(plan.steps[leaf])
    gradients.push_rest(round_.push)
    round_.finish(b"")
    gradients.assign(gradients.used)
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


def test_buckets_pushed_from_hooks_sum_like_the_tree() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
    batches = [torch.randn(4, 7) for _ in range(6)]
    shards = []
    for batch in batches:
        model.zero_grad()
        model(batch).sum().backward()
        shards.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
    expected = [tree_sum([shard[k] for shard in shards], Interval(0, 6)) for k in range(4)]
    for summed, wanted in zip(run_round(model, batches), expected, strict=True):
        assert summed is not None
        assert torch.equal(summed, wanted)


def test_a_parameter_that_no_shard_used_has_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    gradients = run_round(Partly(), [torch.randn(2, 3)] * 3)
    assert [gradient is None for gradient in gradients] == [False, False, True, True]


def test_a_plan_reuses_its_slots() -> None:
    plan = local_plan(24, Interval(0, 24))
    assert max(step.slot for step in plan.steps) < 6
    assert plan.piece_slots == (0,)


def test_memory_for_what_others_hold_now_is_given_back() -> None:
    slots = Slots([torch.zeros(3)])
    wide, narrow = local_plan(24, Interval(1, 23)), local_plan(24, Interval(1, 2))
    slots.reserve(wide)
    in_use = [weakref.ref(partial) for partial in slots.partials(wide)[0]]
    assert len(in_use) > 1
    slots.reserve(narrow)
    assert sum(partial() is not None for partial in in_use) == len(slots.partials(narrow)[0]) == 1


def test_buckets_are_of_one_dtype_aligned_and_complete() -> None:
    parameters = [torch.zeros(n, dtype=d) for n in (3, 1000, 17) for d in (torch.float32, torch.bfloat16)]
    buckets = cut_into_buckets(parameters, 2048)
    assert sorted(index for bucket in buckets for index in bucket.members) == list(range(6))
    for bucket in buckets:
        assert {parameters[index].dtype for index in bucket.members} == {bucket.dtype}
        assert all(offset * bucket.dtype.itemsize % 64 == 0 for offset in bucket.offsets)


def test_sparse_gradients_are_refused_with_what_to_do() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(
        UsageError, match=r"sparse=False in nn.Embedding and nn.EmbeddingBag, and torch.optim.Adam instead"
    ):
        run_round(embedding, [torch.tensor([1, 2])])
