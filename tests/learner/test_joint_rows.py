"""Rows in two parts are compared with them at once: what is not the mean is named with its size, nothing else is."""

from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.training import ElasticModel, weigh
from resile_learner.messages import Message, Progress, Warned
from resile_learner.session import SoloSession, enter_session
from resile_learner.training.data.batches import START, BatchPlan
from resile_learner.training.gradients import Gradients
from resile_learner.training.watch.joint_rows import COMPARED_AT, JointRows

from .shard_bodies import prepare

SAMPLES, BATCH, SHARDS = 96, 32, 8
Loss = Callable[[Tensor, Tensor], Tensor]


class Listening(SoloSession):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.losses: list[float | None] = []

    def report(self, message: Message) -> None:
        if isinstance(message, Warned):
            self.warnings.append(message.message)
        if isinstance(message, Progress):
            self.losses.append(message.loss)


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0.5).long())


def perceptron(*more: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.Tanh(), nn.Linear(16, 3))


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


@pytest.fixture(params=[8, 2], ids=["two shards", "halves of a shard"])
def num_shards(request: pytest.FixtureRequest) -> int:
    """With 8 a shard has 4 samples, with 2 it has 16, of which halves are large enough."""
    number: int = request.param
    return number


def trained(model: nn.Module, loss: Loss = mean, *, num_shards: int = SHARDS) -> tuple[list[str], int]:
    """Train for two epochs; return what was warned of, and how often the body ran."""
    session, runs = Listening(), 0

    def run() -> None:
        nonlocal runs
        enter_session(session)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = prepare(model, optimizer, DataLoader(data(), batch_size=BATCH), num_shards=num_shards)
        for _ in loader.epochs(2):
            for inputs, targets in loader:
                runs += 1
                loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    Context().run(run)
    return session.warnings, runs


def in_double_precision(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.double(), targets)


def in_bfloat16(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.to(torch.bfloat16), targets)


def of_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=torch.tensor([0.1, 3.0, 1.0]))


def with_weight(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = targets == 1
    weigh(mask.sum())
    return (F.cross_entropy(outputs, targets, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def by_logarithm(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean that its graph does not show."""
    return torch.stack(
        [F.cross_entropy(row[None], target[None]) for row, target in zip(outputs, targets, strict=True)]
    ) @ (torch.full((len(outputs),), 1 / len(outputs)))


@pytest.mark.parametrize(
    "loss",
    [mean, in_double_precision, in_bfloat16, of_classes, with_weight, by_logarithm],
    ids=lambda loss: loss.__name__,
)
def test_a_mean_is_not_warned_of(loss: Loss, num_shards: int) -> None:
    assert trained(perceptron(), loss, num_shards=num_shards)[0] == []


@pytest.mark.parametrize(
    "more", [nn.Dropout(0.5), nn.LayerNorm(16), nn.GELU(), nn.PReLU()], ids=lambda more: type(more).__name__
)
def test_layers_that_look_at_one_sample_are_not_warned_of(more: nn.Module, num_shards: int) -> None:
    assert trained(perceptron(more), num_shards=num_shards)[0] == []


class Centered(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
    """Its value is the mean; its gradient is not."""
    each = F.cross_entropy(outputs, targets)
    return each * outputs.detach().abs().max() / outputs.detach().abs().max().clone() + (
        (outputs * outputs.detach().mean(0)).sum() - (outputs * outputs.detach().mean(0)).sum().detach()
    ) / len(outputs)


def test_a_loss_that_is_not_the_mean_is_named_with_both_values(num_shards: int) -> None:
    (warning,), _ = trained(perceptron(Centered()), num_shards=num_shards)
    assert warning.startswith("the loss of a batch is not the mean of the losses of its shards: it is 1.")
    assert "Let the body of the loop run once for each batch" in warning


def test_a_gradient_that_is_not_the_mean_is_named_with_its_parameter(num_shards: int) -> None:
    (warning,), _ = trained(perceptron(), scaled, num_shards=num_shards)
    assert warning.startswith(
        "the gradient of a batch is not the mean of the gradients of its shards, although its loss"
    )
    assert "that of 2." in warning or "that of 0." in warning


def test_a_hook_of_one_small_parameter_is_found(num_shards: int) -> None:
    model: Any = perceptron()
    model[2].bias.register_hook(lambda gradient: gradient / gradient.norm())
    (warning,), _ = trained(model, num_shards=num_shards)
    assert "that of 2.bias differs by" in warning


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs * min(1.0, self.calls / 100)


def test_an_attribute_that_counts_calls_is_named_as_the_cause_and_is_what_it_would_be_without_the_comparison() -> None:
    session, model = Listening(), perceptron(Counting())

    def run() -> None:
        enter_session(session)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = prepare(model, optimizer, DataLoader(data(), batch_size=BATCH), num_shards=SHARDS)
        for _ in loader.epochs(1):
            for inputs, targets in loader:
                mean(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if session.warnings:
                    assert model[1].calls == 1, "the first shard that counts"
                    return

    Context().run(run)
    assert session.warnings[0].startswith("the model changes its attribute 1.calls whenever it is called")


def test_batch_norm_is_named_once_with_the_difference_that_it_makes(num_shards: int) -> None:
    (warning,), _ = trained(perceptron(nn.BatchNorm1d(16)), num_shards=num_shards)
    assert warning.startswith("BatchNorm normalizes each shard by the statistics of its own samples")
    assert " at once, and of " in warning


def test_batch_norm_that_is_frozen_is_not_named() -> None:
    norm = nn.BatchNorm1d(16).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign, assignment]
    assert trained(perceptron(norm))[0] == []


def test_batch_norm_does_not_hide_another_difference(num_shards: int) -> None:
    (warning,), _ = trained(perceptron(nn.BatchNorm1d(16), Centered()), num_shards=num_shards)
    assert warning.startswith("the loss of a batch is not the mean")


def test_the_parameters_are_those_of_a_run_that_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def parameters(*more: nn.Module) -> list[Tensor]:
        trained(model := perceptron(*more, nn.BatchNorm1d(16), nn.Dropout(0.5)))
        return [*model.parameters(), *model.buffers()]

    compared = parameters()
    monkeypatch.setattr("resile_learner.training.watch.joint_rows.COMPARED_AT", ())
    assert all(map(torch.equal, compared, parameters()))


def test_the_body_runs_as_often_as_is_documented() -> None:
    """Each shard once; one of them again where workers would compare it; and three passes to compare rows."""
    iterations, compared = 6, (0, 2, 4)  # of those of `is_compared_iteration`; 3 begins epoch 1, and is one too
    passes = 3 * sum(number in COMPARED_AT for number in range(iterations))
    assert trained(perceptron())[1] == iterations * SHARDS + len((*compared, 3)) + passes
    assert trained(perceptron(), num_shards=1)[1] == iterations, "a single shard is the batch"


def test_a_body_that_draws_random_numbers_is_not_compared() -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs + torch.randn_like(outputs) - outputs.mean(0), targets)

    warnings, runs = trained(perceptron(), noisy)
    assert not [each for each in warnings if "in two parts" in each]
    assert runs < trained(perceptron())[1]


def test_a_training_call_that_computes_by_itself_compares_too() -> None:
    session = Listening()

    def run() -> None:
        enter_session(session)
        model = perceptron(Centered())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ElasticModel(model, lambda: (data(), None), mean, optimizer).train(
            epochs=1, batch_size=BATCH, num_shards=SHARDS
        )

    Context().run(run)
    assert "the loss of a batch is not the mean of the losses of its shards" in session.warnings[0]


def test_no_pass_is_larger_than_a_shard_that_can_be_halved() -> None:
    sizes = []

    class Seen(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            sizes.append(len(inputs))
            return inputs

    trained(perceptron(Seen()), num_shards=2)
    assert set(sizes) == {8, 16}


@pytest.mark.parametrize(
    ("device", "num_shards", "sizes"),
    [("cpu", 8, [4, 4, 8]), ("meta", 8, []), ("cpu", 2, [8, 8, 16]), ("meta", 2, [8, 8, 16]), ("cpu", 1, [])],
)
def test_two_shards_at_once_are_computed_where_memory_is_the_machines(
    device: str, num_shards: int, sizes: list[int]
) -> None:
    """On an accelerator they may be more than fits; a half of a shard, and the shard, is what fits anyway."""
    model = perceptron().to(device)
    batch = BatchPlan(SAMPLES, BATCH, num_shards, seed=0).batch(START)
    rows = JointRows(model, compares=True).passes(0, batch, Gradients(list(model.parameters())))
    assert [each.stop - each.start for each in rows] == sizes
