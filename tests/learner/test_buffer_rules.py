"""What shards change in buffers combines to what the whole batch would change, by any number of workers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from resile.training import buffers
from resile_learner.collectives.tree import Interval, fold_values, pieces, ranges
from resile_learner.training.buffer_rules import Part
from resile_learner.training.buffers import MAX_SENT_BYTES, Buffers, Deltas
from resile_learner.training.digest import params_sha256 as buffers_sha256
from resile_learner.training.slots import local_plan
from resile_learner.training.watch.shard_values import UnknownRule
from resile_shared.errors import UsageError

ROWS = 24
WIDTH = 3


class Changing(nn.Module):
    """A model with one buffer and a queue's pointer; ``change(model, rows)`` changes them."""

    value: Tensor
    pointer: Tensor

    def __init__(self, value: Tensor, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("value", value.clone())
        self.register_buffer("pointer", torch.tensor([5]))
        self._change = change

    def forward(self, rows: Tensor) -> Tensor:
        self._change(self, rows)
        return rows


def by_shards(
    model: nn.Module, rows: Tensor, num_shards: int, num_workers: int, *, combines_alike: bool = True
) -> list[Tensor]:
    """Train one iteration with as many workers, all in turns; return the buffers, which are those of each worker."""
    members = [copy.deepcopy(model) for _ in range(num_workers)]
    of_members = [Buffers(member, combines_alike=combines_alike) for member in members]
    held = ranges(num_shards, num_workers)
    slots: list[Interval] = []
    headers: list[Deltas] = []
    late: set[int] = set()
    left = []
    for member, kept, mine in zip(members, of_members, held, strict=True):
        plan = local_plan(num_shards, mine)
        kept.begin_iteration(compares_values=True)
        kept.begin(plan)
        for shard, step in zip(range(*mine), plan.steps, strict=True):
            part = Part(shard, num_shards, ROWS * shard // num_shards, ROWS * (shard + 1) // num_shards, ROWS)
            kept.restore()
            member(rows[part.start : part.stop])
            kept.collect(part, step)
        slots += pieces(num_shards, mine)
        headers += kept.changes(plan)
        late |= set(kept.late)
        left += [kept.values.left] if mine.hi > mine.lo else []
    of_members[0].values.check(left)
    first = of_members[0]
    total = fold_values(num_shards, slots, copy.deepcopy(headers), first.add)
    sums = [
        kept.late_sums(sorted(late), local_plan(num_shards, mine)) for kept, mine in zip(of_members, held, strict=True)
    ]
    for number, index in enumerate(sorted(late)):
        partials: list[Deltas] = [{index: each} for late_sums in sums for each in late_sums.partials[number]]
        found = fold_values(num_shards, slots, partials, first.add)[index]
        for late_sums in sums:
            late_sums.changes[index].view(-1).copy_(found)
    for kept, late_sums in zip(of_members, sums, strict=True):
        kept.commit(copy.deepcopy(total) | late_sums.changes)
    for member in members[1:]:
        assert buffers_sha256(member) == buffers_sha256(members[0])
    return list(members[0].buffers())


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def count(model: Any, given: Tensor) -> None:
    model.value += (given > 0).sum(0)


def average_sums(model: Any, given: Tensor) -> None:
    model.value.mul_(0.9).add_(given.sum(0), alpha=0.1)


def average_means(model: Any, given: Tensor) -> None:
    model.value = 0.9 * model.value + 0.1 * given.mean(0)


def keep_largest(model: Any, given: Tensor) -> None:
    model.value.copy_(torch.maximum(model.value, given.amax(0).to(model.value.dtype)))


def keep_smallest(model: Any, given: Tensor) -> None:
    model.value.copy_(torch.minimum(model.value, given.amin(0).to(model.value.dtype)))


def flag(model: Any, given: Tensor) -> None:
    model.value |= (given > 1).any(0)


def keep_last(model: Any, given: Tensor) -> None:
    model.value.copy_(given[-1])


def enqueue(model: Any, given: Tensor) -> None:
    places = (int(model.pointer) + torch.arange(len(given))) % 32
    model.value[:, places] = given.T
    model.pointer.copy_((model.pointer + len(given)) % 32)


def start(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


CASES: dict[str, tuple[Tensor, Any, Any]] = {
    "counts": (start(7, 0, 2, dtype=torch.int64), count, "sum"),
    "counts in floats": (start(7, 0, 2), count, "sum"),
    "averages of sums": (start(1, 2, 3), average_sums, ("sum", 0.9)),
    "averages of means": (start(1, 2, 3), average_means, "mean"),
    "maxima": (start(-torch.inf, -9, 2), keep_largest, "max"),
    "maxima of halves": (start(-torch.inf, -9, 2, dtype=torch.bfloat16), keep_largest, "max"),
    "minima": (start(torch.inf, 9, -2), keep_smallest, "min"),
    "minima of integers": (start(90, 9, -2, dtype=torch.int32), keep_smallest, "min"),
    "flags": (torch.tensor([True, False, False]), flag, "any"),
    "the last": (start(1, 2, 3), keep_last, "last"),
    "a queue": (torch.randn(WIDTH, 32, generator=torch.Generator().manual_seed(1)), enqueue, "concat"),
    "many counts": (torch.zeros(MAX_SENT_BYTES // 8, 3, dtype=torch.int64), count, "sum"),
    "many maxima": (torch.full((MAX_SENT_BYTES // 8, 3), -torch.inf), keep_largest, "max"),
    "many flags": (torch.zeros(MAX_SENT_BYTES, 3, dtype=torch.bool), flag, "any"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_buffer_with_a_rule_is_that_of_the_batch_and_has_the_same_bits_on_any_number_of_workers(name: str) -> None:
    value, change, rule = CASES[name]
    model = Changing(value, change)
    buffers(model, value=rule, **({"pointer": rule} if rule == "concat" else {}))
    expected = copy.deepcopy(model)
    expected(rows())
    found = by_shards(model, rows(), 8, 1)
    for one, other in zip(found, expected.buffers(), strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert one.is_floating_point() or torch.equal(one, other)
    for num_workers in (2, 3, 5, 9):
        assert all(map(torch.equal, by_shards(model, rows(), 8, num_workers), found))


def test_a_buffer_may_be_computed_from_others() -> None:
    def change(model: Any, given: Tensor) -> None:
        average_sums(model, given)
        model.twice.copy_(2 * model.value)

    model = Changing(start(1, 2, 3), change)
    model.register_buffer("twice", start(1, 2, 3))
    buffers(model, value=("sum", 0.9), twice=lambda module: 2 * module.value)
    value, _, twice = by_shards(model, rows(), 4, 2)
    assert torch.equal(twice, 2 * value)


def test_a_value_that_is_no_number_is_the_greatest_as_in_pytorch() -> None:
    for rule, change in (("max", keep_largest), ("min", keep_smallest)):
        model = Changing(start(1, 2, 3), change)
        buffers(model, value=rule)
        given = rows()
        given[13, 1] = torch.nan
        expected = copy.deepcopy(model)
        expected(given)
        torch.testing.assert_close(by_shards(model, given, 4, 2)[0], expected.value, equal_nan=True)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        ("counts", 'value="sum"'),
        ("counts in floats", 'value="sum"'),
        ("averages of means", 'value="mean"'),
        ("maxima", 'value="max"'),
        ("minima", 'value="min"'),
        ("flags", 'value="any"'),
        ("a queue", 'value="concat", pointer="concat"'),
    ],
)
def test_a_buffer_that_shards_change_differently_without_a_rule_is_refused(
    name: str, proposed: str, num_workers: int
) -> None:
    value, change, _ = CASES[name]
    with pytest.raises(UnknownRule, match=rf"change the buffer value.*buffers\(model, {proposed}\)"):
        by_shards(Changing(value, change), rows(), 4, num_workers)


def test_a_buffer_that_counts_samples_is_refused_also_if_all_shards_have_as_many() -> None:
    def count_rows(model: Any, given: Tensor) -> None:
        model.value += len(given)

    with pytest.raises(UnknownRule, match='value="sum"'):
        by_shards(Changing(torch.tensor(0), count_rows), rows(), 4, 1)
    with pytest.raises(UnknownRule, match='value="sum"'):
        by_shards(Changing(torch.tensor(0.0), count_rows), rows(), 4, 3)


def test_a_buffer_that_all_shards_change_alike_needs_no_rule() -> None:
    def count_calls(model: Any, given: Tensor) -> None:
        model.value.mul_(0.9).add_(1.0)

    found, _ = by_shards(Changing(start(1, 2, 3), count_calls), rows(), 4, 3)
    torch.testing.assert_close(found, start(1.9, 2.8, 3.7))


def test_slots_that_do_not_follow_from_the_rows_are_refused() -> None:
    def enqueue_first(model: Any, given: Tensor) -> None:
        enqueue(model, given[given[:, 0] > 0])

    model = Changing(torch.zeros(WIDTH, 32), enqueue_first)
    buffers(model, value="concat", pointer="concat")
    with pytest.raises(UsageError, match='"concat"'):
        by_shards(model, rows(), 4, 1)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"vlaue": "sum"}, "a rule for vlaue, and the model has no such buffer: it has value, pointer"),
        ({"value": "median"}, "was given 'median' for value: use one of mean, sum"),
        ({"value": ("max", 0.9)}, "was given .*0.9.* for value"),
        ({"pointer": "mean"}, r'the buffer pointer is of torch.int64, which the rule "mean" cannot have'),
        ({"value": "any"}, r'the buffer value is of torch.float32, which the rule "any" cannot have'),
    ],
)
def test_a_rule_that_cannot_work_is_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        buffers(Changing(start(1), count), **rules)


def test_slots_without_a_pointer_are_refused() -> None:
    model = Changing(torch.zeros(3, 32), enqueue)
    buffers(model, value="concat")
    with pytest.raises(UsageError, match="and one integer in the same module, also with the rule"):
        Buffers(model)


def test_a_pattern_names_buffers_of_many_modules() -> None:
    model = nn.ModuleList(Changing(start(1, 2, 3), count) for _ in range(2))
    buffers(model, **{"*.value": "sum"})
    assert [rule.kind for rule in Buffers(model).rules] == ["sum", "first", "sum", "first"]


def test_the_rules_of_library_modules_are_known() -> None:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    model = nn.ModuleList(
        [
            nn.BatchNorm1d(2),
            nn.InstanceNorm1d(2, track_running_stats=True),
            nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
            FakeQuantize(MovingAverageMinMaxObserver),
        ]
    )
    kinds = {
        name.rpartition(".")[2]: rule
        for name, rule in zip(dict(model.named_buffers()), Buffers(model).rules, strict=True)
    }
    expected = {
        "running_mean": "mean",
        "num_batches_tracked": "first",
        "_u": "first",
        "_v": "first",
        "min_val": "min",
        "max_val": "max",
        "scale": "derived",
        "zero_point": "derived",
    }
    assert {name: kinds[name].kind for name in expected} == expected


def test_observers_of_quantization_have_the_extremes_of_the_batch() -> None:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    model = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    expected = copy.deepcopy(model)
    for _ in range(2):
        expected(rows())
        for one, other in zip(model.buffers(), by_shards(model, rows(), 4, 2), strict=True):
            one.copy_(other)
    for name, one in model.named_buffers():
        torch.testing.assert_close(one, dict(expected.named_buffers())[name])
