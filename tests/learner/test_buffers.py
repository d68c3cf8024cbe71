import pytest
import torch
from torch import nn

from resile_learner.collectives.tree import Interval
from resile_learner.training.buffer_rules import Part
from resile_learner.training.buffers import Buffers, Deltas
from resile_learner.training.slots import LeafStep, local_plan
from resile_shared.errors import UsageError


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def begin(buffers: Buffers, num_shards: int) -> list[LeafStep]:
    """Begin an iteration in which one worker has all shards: its partial sums are the sums."""
    plan = local_plan(num_shards, Interval(0, num_shards))
    buffers.begin(plan)
    for (partial,), sums in zip(buffers.partials(plan), buffers.sums, strict=True):
        assert partial.data_ptr() == sums.data_ptr()
    return list(plan.steps)


def part(shard: int, num_shards: int = 2) -> Part:
    """A shard of four rows."""
    return Part(shard, num_shards, 4 * shard, 4 * shard + 4, 4 * num_shards)


def changes(buffers: Buffers, num_shards: int = 2) -> Deltas:
    """What all shards have changed in buffers that travel in headers."""
    (found,) = buffers.changes(local_plan(num_shards, Interval(0, num_shards)))
    return found


def test_every_shard_starts_from_the_committed_buffers_and_they_average_by_weight() -> None:
    model = nn.BatchNorm1d(3)
    buffers = Buffers(model)
    shards = [torch.randn(4, 3), torch.randn(8, 3)]
    alone = []
    for shard in shards:
        copy = nn.BatchNorm1d(3)
        copy(shard)
        alone.append(copy.running_mean)
    steps = begin(buffers, 2)
    for leaf, shard in enumerate(shards):
        buffers.restore()
        model(shard)
        assert torch.equal(model.running_mean, alone[leaf])  # type: ignore[arg-type]
        buffers.collect(Part(leaf, 2, 4 * leaf, 4 + 8 * leaf, 12), steps[leaf])
    assert list(changes(buffers)) == [2], "statistics travel in buckets, the counter does not"
    buffers.commit(changes(buffers))
    torch.testing.assert_close(model.running_mean, alone[0] * 4 / 12 + alone[1] * 8 / 12)  # type: ignore[operator]
    assert model.num_batches_tracked == 1


def test_other_floating_point_buffers_are_summed_if_they_change() -> None:
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2))

    model = Scaled()
    buffers = Buffers(model)
    for leaf, step in enumerate(begin(buffers, 2)):
        buffers.restore()
        model.scale += leaf + 1
        buffers.collect(part(leaf), step)
    buffers.commit(changes(buffers))
    assert model.scale.tolist() == [2.5, 2.5]


def test_a_shard_that_counts_for_nothing_leaves_the_statistics() -> None:
    model = nn.BatchNorm1d(3)
    buffers = Buffers(model)
    (step,) = begin(buffers, 1)
    model(torch.randn(4, 3))
    alone = model.running_mean.clone()  # type: ignore[operator]
    buffers.collect(part(0, 1), step)
    model(torch.randn(8, 3))
    buffers.collect(part(0, 1), None)
    buffers.commit({})
    torch.testing.assert_close(model.running_mean, alone)


def test_what_a_script_writes_between_iterations_is_committed_and_what_a_shard_left_is_not() -> None:
    model = nn.BatchNorm1d(2)
    buffers = Buffers(model)
    model.running_mean.fill_(3.0)  # type: ignore[operator,union-attr]
    buffers.begin_iteration(compares_values=False)
    (step,) = begin(buffers, 1)
    model(torch.randn(4, 2))
    buffers.collect(part(0, 1), step)
    buffers.begin_iteration(compares_values=False)
    buffers.restore()
    assert model.running_mean.tolist() == [3.0, 3.0]  # type: ignore[operator,union-attr]


def test_constant_buffers_are_neither_sent_nor_changed() -> None:
    class Masked(nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mask

    model = Masked()
    before = statistics(model)
    buffers = Buffers(model)
    model(torch.zeros(2, 2))
    buffers.collect(part(0, 1), begin(buffers, 1)[0])
    assert changes(buffers, 1) == {}
    buffers.commit({})
    assert torch.equal(model.mask, before["mask"])


def test_a_member_without_shards_gets_the_same_buffers_as_the_others() -> None:
    here, there = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    mine, theirs = Buffers(here), Buffers(there)
    here(torch.randn(5, 2))
    mine.collect(part(0, 1), begin(mine, 1)[0])
    theirs.begin(local_plan(1, Interval(0, 0)))
    for there_sums, here_sums in zip(theirs.sums, mine.sums, strict=True):
        there_sums.copy_(here_sums)
    deltas = changes(mine, 1)
    mine.commit(deltas)
    theirs.commit(deltas)
    for name, buffer in statistics(here).items():
        assert torch.equal(buffer, statistics(there)[name])


def test_what_a_body_changes_after_its_loss_does_not_reach_the_next_shard() -> None:
    norms = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    buffers = Buffers(norms)
    steps = begin(buffers, 2)
    buffers.restore()
    norms[0](torch.randn(4, 2))
    buffers.collect(part(0), steps[0])
    norms[1](torch.randn(4, 2))
    buffers.restore()
    assert torch.equal(norms[1].running_mean, torch.zeros(2))
    buffers.collect(part(1), steps[1])
    assert list(changes(buffers)) == [2], "the counter of the first"
    buffers.commit({})
    assert torch.equal(norms[1].running_mean, torch.zeros(2))
    assert not torch.equal(norms[0].running_mean, torch.zeros(2))


class Holder(nn.Module):
    """A module with one buffer."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer(name, value)


def train(model: nn.Module, *, num_iterations: int = 2) -> None:
    """Run iterations of two shards that leave the buffers of ``model`` alone."""
    buffers = Buffers(model)
    for _ in range(num_iterations):
        buffers.begin_iteration(compares_values=False)
        for leaf, step in enumerate(begin(buffers, 2)):
            buffers.restore()
            buffers.collect(part(leaf), step)
        buffers.commit({})


def test_statistics_that_no_shard_changes_keep_their_bits_also_infinities_and_negative_zeros() -> None:
    model = Holder("running_min", torch.tensor([torch.inf, -torch.inf, -0.0, 1e-40]))
    before = model.running_min.clone()  # type: ignore[operator,union-attr]
    train(model)
    assert torch.equal(model.running_min.view(torch.int32), before.view(torch.int32))  # type: ignore[operator,union-attr]


def test_statistics_that_cannot_be_summed_or_written_are_left_alone() -> None:
    expanded = Holder("running_scale", torch.ones(1).expand(8))
    train(expanded)
    assert torch.equal(expanded.running_scale, torch.ones(8))  # type: ignore[arg-type]
    train(Holder("running_scale", torch.zeros(3).to(torch.float8_e4m3fn)))


def test_statistics_of_any_shape_and_strides_are_summed() -> None:
    values = [torch.zeros(()), torch.zeros(0), torch.zeros(6)[::2], torch.zeros(3, 4).t()]
    model = nn.ModuleList(Holder("running_value", value) for value in values)
    buffers = Buffers(model)
    for leaf, step in enumerate(begin(buffers, 2)):
        buffers.restore()
        for buffer in model.buffers():
            buffer.add_(leaf + 1.0)
        buffers.collect(part(leaf), step)
    buffers.commit({})
    for buffer in model.buffers():
        assert torch.equal(buffer, torch.full_like(buffer, 1.5))


def test_a_buffer_that_is_replaced_by_assignment_has_changed() -> None:
    model = Holder("average", torch.zeros(2))
    buffers = Buffers(model)
    for _ in range(2):
        for leaf, step in enumerate(begin(buffers, 2)):
            buffers.restore()
            model.average = model.average + (leaf + 1)
            buffers.collect(part(leaf), step)
        buffers.commit(changes(buffers))
    assert model.average.tolist() == [3.0, 3.0]


def test_a_buffer_that_is_replaced_by_equal_values_or_by_a_longer_cache_has_not_changed() -> None:
    model = nn.ModuleList([Holder("mask", torch.full((2,), -torch.inf)), Holder("cache", torch.zeros(2))])
    buffers = Buffers(model)
    (step,) = begin(buffers, 1)
    buffers.restore()
    model[0].mask = model[0].mask.clone()  # type: ignore[operator,union-attr]
    model[1].cache = torch.zeros(4)
    buffers.collect(part(0, 1), step)
    assert changes(buffers, 1) == {}
    buffers.commit({})
    assert torch.equal(model[0].mask, torch.full((2,), -torch.inf))  # type: ignore[arg-type]


def test_a_buffer_that_was_written_and_then_replaced_by_a_longer_cache_is_left_alone() -> None:
    written = torch.zeros(2)
    written += 1.0
    model = Holder("cache", written)
    buffers = Buffers(model)
    model.cache = torch.arange(4.0)
    buffers.begin_iteration(compares_values=False)
    (step,) = begin(buffers, 1)
    buffers.restore()
    buffers.collect(part(0, 1), step)
    assert changes(buffers, 1) == {}
    buffers.commit({})
    buffers.adopt()
    buffers.reset(buffers.committed())
    assert model.cache.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_cache_that_grew_on_one_member_ignores_the_changes_of_others() -> None:
    model = Holder("cache", torch.zeros(2))
    buffers = Buffers(model)
    begin(buffers, 1)
    buffers.restore()
    model.cache = torch.arange(4.0)
    buffers.commit({0: torch.ones(2)})
    assert model.cache.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_expanded_buffer_can_be_reset() -> None:
    model = Holder("scale", torch.ones(1).expand(4))
    buffers = Buffers(model)
    buffers.reset(buffers.committed())
    assert torch.equal(model.scale, torch.ones(4))  # type: ignore[arg-type]


def average_in_iterations(model: Holder, *, compared: list[bool], written_from: int = 0) -> None:
    """Run iterations of two shards that add 1 and 2 to ``model.average`` so that PyTorch does not count it."""
    buffers = Buffers(model)
    for number, compares_values in enumerate(compared):
        buffers.begin_iteration(compares_values=compares_values)
        for leaf, step in enumerate(begin(buffers, 2)):
            buffers.restore()
            if number >= written_from:
                model.average.data.add_(leaf + 1.0)  # type: ignore[operator,union-attr]
            buffers.collect(part(leaf), step)
        buffers.commit(changes(buffers))


@pytest.mark.parametrize("compared", [[True, False, False], [False, False, False]])
def test_what_is_written_through_data_is_exchanged_from_the_first_iteration_on(compared: list[bool]) -> None:
    """Also on a worker that has joined, whose first iteration is none in which all compare."""
    model = Holder("average", torch.tensor([0.0, torch.nan]))
    average_in_iterations(model, compared=compared)
    torch.testing.assert_close(model.average, torch.tensor([4.5, torch.nan]), equal_nan=True)


def test_a_buffer_without_a_value_has_not_changed() -> None:
    model = Holder("average", torch.full((2,), torch.nan))
    buffers = Buffers(model)
    buffers.begin_iteration(compares_values=True)
    (step,) = begin(buffers, 1)
    buffers.restore()
    buffers.collect(part(0, 1), step)
    assert changes(buffers, 1) == {}


def test_what_was_written_through_data_and_not_noticed_is_refused_by_name() -> None:
    model = Holder("average", torch.zeros(2))
    with pytest.raises(UsageError, match=r"the buffer average was written through \.data or numpy"):
        average_in_iterations(model, compared=[True, False, True], written_from=1)


def test_a_buffer_that_two_modules_begin_with_is_each_ones_own_once_it_is_replaced() -> None:
    start = torch.zeros(1)
    model = nn.ModuleList(Holder("average", start) for _ in range(2))
    buffers = Buffers(model)
    for leaf, step in enumerate(begin(buffers, 2)):
        buffers.restore()
        for number, module in enumerate(model):
            module.average = module.average + (leaf + 1.0) * (number + 1.0)
        buffers.collect(part(leaf), step)
    buffers.commit(changes(buffers))
    assert [module.average.item() for module in model] == [1.5, 3.0]


def test_a_buffer_that_two_modules_share_changes_once() -> None:
    model = nn.ModuleList(Holder("average", torch.zeros(1)) for _ in range(1))
    model.append(Holder("average", model[0].average))
    buffers = Buffers(model)
    (step,) = begin(buffers, 1)
    buffers.restore()
    model[1].average.add_(1.0)
    buffers.collect(part(0, 1), step)
    buffers.commit(changes(buffers, 1))
    assert [module.average.item() for module in model] == [1.0, 1.0]


def test_a_minimum_that_begins_at_infinity_is_refused_by_name_instead_of_becoming_no_number() -> None:
    model = Holder("least", torch.tensor([torch.inf, 0.0]))
    buffers = Buffers(model)
    (step,) = begin(buffers, 1)
    buffers.restore()
    model.least.copy_(torch.tensor([1.0, -1.0]))  # type: ignore[operator,union-attr]
    buffers.collect(part(0, 1), step)
    deltas = changes(buffers, 1)
    with pytest.raises(UsageError, match="the buffer least is infinite where shards write other values"):
        buffers.commit(deltas)
