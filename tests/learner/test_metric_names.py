"""A metric that only some shards have is named: its mean over the global batch would be wrong."""

from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop, Validation, seed
from resile_learner.collectives.tree import Interval
from resile_learner.training.metric_names import find_partial_metric
from resile_shared.errors import UsageError


def test_shards_with_the_same_metrics_have_no_partial_one() -> None:
    assert find_partial_metric([]) == ""
    assert find_partial_metric([(Interval(0, 2), ("loss", "accuracy")), (Interval(2, 3), ("accuracy", "loss"))]) == ""


def test_a_partial_metric_is_named_with_its_shards() -> None:
    given = [(Interval(0, 2), ("loss",)), (Interval(2, 3), ("loss", "accuracy")), (Interval(3, 10), ("loss",))]
    fault = find_partial_metric(given)
    assert fault.startswith(
        "the metric accuracy was given for shard 2 and not for shards 0, 1, 3, 4, 5, ... of a global"
    )


def train(metrics: Callable[[int], dict[str, float]], **options: Any) -> None:
    """Train with ``metrics(number)`` for each shard of four in an iteration."""

    def run() -> None:
        seed(0)
        x = torch.randn(32, 4)
        dataset = TensorDataset(x, (x.sum(1) > 0).long())
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in ElasticLoop(model, optimizer, dataset, batch_size=16, num_shards=4, **options):
            for inputs, targets in iteration.shards():
                number = len(iteration._leaves.computed)  # those of passes that do not count are discarded
                iteration.backward(F.cross_entropy(model(inputs), targets), **metrics(number))
            if iteration.exchange():
                optimizer.step()

    Context().run(run)


@pytest.mark.parametrize(
    ("having", "complaint"), [(0, "shard 0 and not for shard 1"), (3, "shard 3 and not for shards 0, 1, 2")]
)
def test_an_iteration_refuses_a_metric_of_some_of_its_shards(having: int, complaint: str) -> None:
    with pytest.raises(UsageError, match=f"the metric accuracy was given for {complaint} of a global batch"):
        train(lambda number: {"accuracy": 1.0} if number == having else {})


@pytest.mark.parametrize(
    ("having", "complaint"),
    [
        (range(1, 2), "the metric rare was given for shard 1 and not for shards 0, 2, 3"),
        (range(4), "the score rare was returned for some batches of the validation and not for others"),
        (range(4, 8), "the score rare was returned for some batches of the validation and not for others"),
    ],
)
def test_a_validation_refuses_a_score_of_some_of_its_samples(having: range, complaint: str) -> None:
    """It has two batches of four shards."""
    calls = iter(range(8))

    def scores(model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": 1.0, **({"rare": 1.0} if next(calls) in having else {})}

    with pytest.raises(UsageError, match=complaint):
        train(lambda number: {}, validation=Validation(TensorDataset(torch.randn(32, 4), torch.zeros(32)), scores))
