from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resile_learner.training.data.batches import Batch, BatchPlan, Position, default_num_shards
from resile_shared.errors import UsageError


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    batch_size = draw(st.integers(1, 64))
    return BatchPlan(draw(st.integers(1, 300)), batch_size, draw(st.integers(1, batch_size)), draw(st.integers(0, 9)))


@st.composite
def dropping_plans(draw: st.DrawFn) -> BatchPlan:
    plan = draw(plans())
    return replace(plan, num_samples=plan.num_samples + plan.batch_size, drop_last=True)


def batches(plan: BatchPlan) -> list[Batch]:
    """The batches of an epoch, each where the one before it ended."""
    found, position = [], Position()
    while position.epoch == 0:
        found.append(plan.batch(position))
        position = found[-1].next
    return found


@given(plans(), st.integers(1, 30))
def test_every_sample_is_in_exactly_one_shard_of_an_epoch_whatever_the_number_of_workers(
    plan: BatchPlan, size: int
) -> None:
    seen: list[int] = []
    for batch in batches(plan):
        for rank in range(size):
            for leaf in range(*batch.held_by(rank, size)):
                seen += batch.shard(leaf).tolist()
    assert sorted(seen) == list(range(plan.num_samples))


@given(plans(), st.integers(1, 30))
def test_in_fast_mode_each_worker_has_a_shard_as_far_as_there_are_samples(plan: BatchPlan, size: int) -> None:
    position = Position()
    while position.epoch == 0:
        batch = plan.batch(position, num_workers=size)
        held = [[batch.shard(leaf) for leaf in range(*batch.held_by(rank, size))] for rank in range(size)]
        assert sum(map(bool, held)) == min(size, len(batch.indices))
        assert all(len(shard) for shards in held for shard in shards)
        position = batch.next


@given(plans(), st.integers(1, 30), st.integers(1, 70))
def test_a_share_that_is_too_large_for_one_pass_is_cut_into_equal_ones(plan: BatchPlan, size: int, limit: int) -> None:
    limited, position = replace(plan, micro_batch_size=limit), Position()
    while position.epoch == 0:
        batch, whole = limited.batch(position, num_workers=size), plan.batch(position, num_workers=size)
        assert batch.num_leaves == whole.num_leaves == whole.num_shards
        for rank in range(size):
            share = [int(index) for leaf in range(*whole.held_by(rank, size)) for index in whole.shard(leaf)]
            passes = [batch.shard(shard).tolist() for shard in range(*batch.held_by(rank, size))]
            assert [index for each in passes for index in each] == share
            assert len(passes) <= -(-len(batch.indices) // (size * limit)), "and into no more than need be"
            assert all(0 < len(each) <= limit for each in passes)
            assert len(set(map(len, passes))) <= 2
            assert (batch.leaves_of(rank, size) == whole.held_by(rank, size)) == bool(share or not passes)
        position = batch.next


def test_a_worker_alone_computes_in_two_passes_what_the_noise_is_measured_of() -> None:
    plan, position, passes = BatchPlan(320, 10, 1, seed=0, largest=40), Position(), []
    while position.epoch == 0:
        batch = plan.batch(position, num_workers=1)
        assert batch.num_leaves == 1
        assert batch.measures_noise == (batch.num_shards == 2)
        assert plan.batch(position, num_workers=3).num_shards == 3
        passes.append(batch.num_shards)
        position = batch.next
    assert passes == 4 * [2, 1, 1, 1, 1, 1, 1, 1]
    assert replace(plan, largest=None).batch(Position(), num_workers=1).num_shards == 1, "its batch never changes"
    assert replace(plan, batch_size=1).batch(Position(), num_workers=1).num_shards == 1


@given(plans(), st.integers(1, 70))
def test_shards_of_a_validation_are_no_larger_than_a_pass(plan: BatchPlan, limit: int) -> None:
    for batch in batches(replace(plan, micro_batch_size=limit)):
        assert max(len(batch.shard(leaf)) for leaf in range(batch.num_shards)) <= limit
        assert batch.num_leaves == batch.num_shards


@given(plans())
def test_shards_are_as_large_as_the_rules_say(plan: BatchPlan) -> None:
    for batch in batches(plan):
        sizes = [len(batch.shard(leaf)) for leaf in range(batch.num_shards)]
        assert max(sizes) - min(sizes) <= 1
        assert batch.num_shards <= plan.num_shards
        if len(batch.indices) > 1 and len(batch.indices) < plan.batch_size:
            assert min(sizes) >= 2, "a short batch has fewer shards, not tiny ones"
        assert sum(batch.weight(leaf) for leaf in range(batch.num_shards)) == pytest.approx(1)


@given(st.one_of(plans(), dropping_plans()), st.integers(1, 3))
def test_batches_of_one_size_are_counted_without_making_them(plan: BatchPlan, epochs: int) -> None:
    made = batches(plan)
    assert plan.per_epoch == len(made)
    assert [made[0].epoch, *(batch.next.epoch for batch in made)] == [0] * len(made) + [1]
    starts = [Position(), *(batch.next for batch in made)]
    assert [plan.position(number) for number in range(len(starts))] == starts
    left = [plan.num_batches(position, epochs=epochs) for position in starts]
    assert left == list(range(epochs * len(made), (epochs - 1) * len(made) - 1, -1))


@given(plans(), st.lists(st.integers(1, 64), max_size=20))
def test_batches_of_any_sizes_that_follow_each_other_use_every_sample_once(plan: BatchPlan, sizes: list[int]) -> None:
    everything = replace(plan, batch_size=plan.num_samples, num_shards=1).batch(Position()).indices
    seen: list[int] = []
    position = Position()
    while position.epoch == 0:
        batch_size = sizes.pop() if sizes else plan.batch_size
        batch = replace(plan, batch_size=batch_size, num_shards=min(plan.num_shards, batch_size)).batch(position)
        seen += batch.indices.tolist()
        position = batch.next
    assert seen == everything.tolist()


@given(dropping_plans())
def test_samples_that_do_not_fill_a_batch_are_left_out(plan: BatchPlan) -> None:
    assert {len(batch.indices) for batch in batches(plan)} == {plan.batch_size}
    seen = np.concatenate([batch.indices for batch in batches(plan)])
    assert len(set(seen.tolist())) == len(seen) == plan.num_samples - plan.num_samples % plan.batch_size


def test_a_lone_leftover_sample_joins_the_batch_before_it() -> None:
    plan = BatchPlan(97, 48, 12, seed=0)
    assert [len(batch.indices) for batch in batches(plan)] == [48, 49]


def test_epochs_have_different_orders_and_the_same_seed_has_the_same() -> None:
    plan = BatchPlan(100, 100, 4, seed=0)
    first, second = plan.batch(Position(0)).indices, plan.batch(Position(1)).indices
    assert not np.array_equal(first, second)
    assert np.array_equal(first, BatchPlan(100, 100, 4, seed=0).batch(Position()).indices)
    assert not np.array_equal(first, BatchPlan(100, 100, 4, seed=1).batch(Position()).indices)


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [(576, 24), (575, 12), (287, 8), (192, 8), (96, 8), (64, 8), (48, 6), (32, 4), (16, 2), (9, 1), (1, 1)],
)
def test_the_default_number_of_shards_depends_on_the_batch_alone(batch_size: int, expected: int) -> None:
    assert default_num_shards(batch_size) == expected


@pytest.mark.parametrize(("samples", "batch_size", "num_shards"), [(0, 8, 1), (8, 0, 1), (8, 8, 0), (8, 8, 9)])
def test_settings_that_cannot_work_are_refused(samples: int, batch_size: int, num_shards: int) -> None:
    with pytest.raises(UsageError):
        BatchPlan(samples, batch_size, num_shards, seed=0)


def test_a_batch_that_may_grow_may_have_fewer_samples_than_shards() -> None:
    plan = BatchPlan(100, 8, 16, seed=0, largest=64)
    assert [batch.num_shards for batch in batches(plan)][:2] == [4, 4], "of two samples"
    assert [batch.num_shards for batch in batches(replace(plan, batch_size=32))] == [16, 16, 16, 2]
    with pytest.raises(UsageError, match="num_shards is 65 for a batch of 64"):
        replace(plan, num_shards=65)
