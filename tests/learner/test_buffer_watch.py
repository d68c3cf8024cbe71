"""Buffers that no worker would exchange are refused by name, unless they are caches."""

from contextvars import Context

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop
from resile_learner.session import SoloSession, enter_session
from resile_shared.errors import UsageError


class Averaging(nn.Module):
    """Follows the mean of its inputs in a buffer whose shape its first forward pass decides."""

    def __init__(self, average: Tensor | None, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("average", average, persistent=persistent)
        self.average: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.average is None or len(self.average) != inputs.shape[1]:
            self.average = torch.zeros(inputs.shape[1])
        self.average += 0.1 * (inputs.mean(0) - self.average)
        output: Tensor = self.layer(inputs)
        return output


class Positions(nn.Module):
    """Caches a table of positions, anew for each batch; one of its entries is no number."""

    def __init__(self, table: Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        self.table = torch.arange(1.0, inputs.shape[1] + 1).masked_fill(torch.arange(inputs.shape[1]) == 2, torch.nan)
        output: Tensor = self.layer(inputs + self.table.nan_to_num())
        return output


def train(module: nn.Module) -> None:
    """Train five iterations."""
    model = nn.Sequential(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        enter_session(SoloSession())
        dataset = TensorDataset(torch.ones(40, 4))
        for iteration in ElasticLoop(model, optimizer, dataset, batch_size=8, num_shards=2):
            for (inputs,) in iteration.shards():
                iteration.backward(model(inputs).square().mean())
            if iteration.exchange():
                optimizer.step()

    Context().run(run)


def test_a_persistent_buffer_that_a_forward_pass_creates_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the buffer 0\.average got a value after the training call began"):
        train(Averaging(None, persistent=True))


class Pruned(nn.Module):
    """A layer that is pruned in its third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.num_batches = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_batches += 1
        if self.num_batches == 3:
            prune.l1_unstructured(self.layer, "weight", amount=0.5)
        output: Tensor = self.layer(inputs)
        return output


def test_a_layer_that_is_pruned_while_it_trains_is_named() -> None:
    with pytest.raises(UsageError, match=r"the layer 0\.layer was pruned .*`torch.nn.utils.prune.identity\(layer, 'we"):
        train(Pruned())


def test_a_persistent_buffer_that_a_forward_pass_replaces_by_a_longer_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"0\.average got another shape .*\[4\] torch.float32 instead of \[2\]"):
        train(Averaging(torch.zeros(2), persistent=True))


@pytest.mark.parametrize("table", [None, torch.zeros(2)], ids=["created", "longer"])
def test_caches_are_accepted(table: Tensor | None) -> None:
    train(Positions(table))


@pytest.mark.parametrize("average", [None, torch.zeros(2)], ids=["created", "longer"])
def test_a_statistic_is_no_cache(average: Tensor | None) -> None:
    """Training may not depend on it, and scores do."""
    with pytest.raises(UsageError, match=r"the buffer 0\.average got a value after .* that changes with the batches"):
        train(Averaging(average, persistent=False))


def test_a_persistent_buffer_of_a_fixed_shape_is_accepted() -> None:
    train(Averaging(torch.zeros(4), persistent=True))
