"""Shards whose losses are means with weights of their own: their sum is the mean of the batch, as in plain PyTorch."""

from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.training import ElasticLoop, weigh
from resile_learner.messages import Warned
from resile_learner.session import SoloSession, enter_session
from resile_learner.training.watch.losses import NotANumber
from resile_shared.errors import UsageError

from .shard_bodies import prepare

SAMPLES, BATCH, TOKENS, CLASSES = 96, 32, 6, 5
Loss = Callable[[Tensor, Tensor], Tensor]
IGNORED = -100


def dataset() -> TensorDataset:
    """Texts of different lengths; a quarter of them has no labels at all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, TOKENS, 4, generator=generator)
    labels = x.argmax(2)
    lengths = torch.randint(0, TOKENS + 1, (SAMPLES, 1), generator=generator)
    lengths[SAMPLES // 4 : SAMPLES // 2] = 0
    labels[torch.arange(TOKENS)[None] >= lengths] = IGNORED
    return TensorDataset(x, labels)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, CLASSES)


def ignoring(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.tensor([0.1, 1.0, 5.0, 1.0, 2.0])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight, label_smoothing=0.1)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != IGNORED).float()
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (each * mask).sum() / mask.sum()


def clamped(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != IGNORED).float()
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (each * mask).sum() / mask.sum().clamp(min=1.0)


def with_epsilon(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != IGNORED).float()
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (each * mask).sum() / (mask.sum() + 1e-8)


def selected(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != IGNORED
    return F.mse_loss(logits[kept].softmax(1), F.one_hot(labels[kept], CLASSES).float())


def declared(logits: Tensor, labels: Tensor) -> Tensor:
    """Its graph shows a product with a number."""
    kept = labels != IGNORED
    weigh(kept.sum())
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.sum() * (1 / int(kept.sum()) if kept.any() else float("nan"))


LOSSES = [ignoring, of_classes, masked, clamped, with_epsilon, selected, declared]


def plain(loss_fn: Loss) -> Tensor:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    for x, y in DataLoader(dataset(), batch_size=BATCH):
        optimizer.zero_grad()
        loss_fn(trained(x), y).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(trained.parameters()).detach()


def by_loop(trained: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss) -> None:
    loop = ElasticLoop(trained, optimizer, dataset(), batch_size=BATCH, num_shards=8, shuffle=False)
    for iteration in loop:
        for x, y in iteration.shards():
            iteration.backward(loss_fn(trained(x), y))
        if iteration.exchange():
            optimizer.step()


def by_prepare(trained: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss) -> None:
    data = DataLoader(dataset(), batch_size=BATCH)
    trained, optimizer, loader = prepare(trained, optimizer, data, num_shards=8)
    for _ in loader.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(trained(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("train", [by_loop, by_prepare])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_shards_count_by_the_weights_of_their_losses(
    train: Callable[[nn.Module, torch.optim.Optimizer, Loss], None], loss_fn: Loss
) -> None:
    trained = model()

    def run() -> None:
        enter_session(SoloSession())
        train(trained, torch.optim.SGD(trained.parameters(), lr=0.5), loss_fn)

    Context().run(run)
    assert torch.allclose(nn.utils.parameters_to_vector(trained.parameters()), plain(loss_fn), atol=1e-6)


def trained_by(loss_fn: Loss, **settings: Any) -> tuple[Tensor, list[str]]:
    """Train an ElasticLoop of 8 shards; return the parameters and what was warned of."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    session = SoloSession()

    def run() -> None:
        enter_session(session)
        loop = ElasticLoop(trained, optimizer, dataset(), batch_size=BATCH, num_shards=8, shuffle=False, **settings)
        for iteration in loop:
            for x, y in iteration.shards():
                iteration.backward(loss_fn(trained(x), y))
            if iteration.exchange():
                optimizer.step()

    warned: list[str] = []
    report = session.report

    def reported(message: Any) -> None:
        warned.extend([message.message] if isinstance(message, Warned) else [])
        report(message)

    session.report = reported  # type: ignore[method-assign]
    Context().run(run)
    return nn.utils.parameters_to_vector(trained.parameters()).detach(), warned


def test_a_batch_without_labels_is_refused_as_one_that_has_no_loss() -> None:
    with pytest.raises(NotANumber, match=r"iteration 0.*resile.training.weigh\(mask.sum\(\)\)"):
        trained_by(lambda logits, labels: ignoring(logits, torch.full_like(labels, IGNORED)))


def test_shards_that_are_batches_of_the_script_count_by_their_samples() -> None:
    """As with gradients that a plain loop accumulates over batches: each counts as much, however many labels it has."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    data = dataset()
    for number in range(0, SAMPLES, 4):
        x, y = (tensor[number : number + 4] for tensor in data.tensors)
        (ignoring(trained(x), y).nan_to_num() / 8).backward()
        if number % BATCH == BATCH - 4:
            optimizer.step()
            optimizer.zero_grad()
    found, _ = trained_by(lambda logits, labels: ignoring(logits, labels).nan_to_num(), weighs_by_samples=True)
    assert torch.allclose(found, nn.utils.parameters_to_vector(trained.parameters()), atol=1e-6)


def test_a_mean_with_weights_beside_one_over_samples_is_named() -> None:
    _, warned = trained_by(lambda logits, labels: ignoring(logits, labels.clamp(0)) + logits.square().mean())
    assert warned == []
    _, warned = trained_by(lambda logits, labels: of_classes(logits, labels.clamp(0)) + logits.square().mean())
    assert warned[0].startswith("the loss adds a mean with weights of its own")


def contrasting(logits: Tensor, labels: Tensor) -> Tensor:
    rows = F.normalize(logits.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


@pytest.mark.parametrize(
    "loss_fn",
    [
        contrasting,
        lambda logits, labels: logits.square().mean().sqrt(),
        lambda logits, labels: ignoring(logits, labels.clamp(0)) + 1e-3 * logits.square().sum(),
        lambda logits, labels: torch.cdist(logits[:, 0], logits[:, 0]).mean(),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_named_once(loss_fn: Loss) -> None:
    _, warned = trained_by(loss_fn)
    assert [text[:45] for text in warned] == ["the loss of a batch is not the mean of the lo"]


def test_a_mean_that_does_not_look_like_one_is_not_named_as_it_is_computed_in_two_ways() -> None:
    assert trained_by(lambda logits, labels: logits.softmax(-1)[..., 0].sum() / logits.softmax(-1).sum())[1] == []


def test_a_loss_that_does_not_look_like_a_mean_is_named_where_random_numbers_hide_whether_it_is() -> None:
    def noisy(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits + torch.rand_like(logits)).square().mean().sqrt()

    _, warned = trained_by(noisy)
    assert [text[:45] for text in warned] == ["the loss does not look like a mean over sampl"]


def test_what_a_script_says_of_its_loss_counts() -> None:
    def said(logits: Tensor, labels: Tensor) -> Tensor:
        weigh(len(logits))
        return logits.square().sum() * (1.0 / logits.numel())

    assert trained_by(said)[1] == []
    sums = [
        lambda logits, labels: logits.square().sum() / logits.numel(),
        lambda logits, labels: F.kl_div(logits.log_softmax(-1), logits.detach().softmax(-1), reduction="batchmean"),
    ]
    (_, first), (_, second) = map(trained_by, sums)
    assert first == second == []


def test_shards_that_disagree_on_weights_are_refused() -> None:
    def sometimes(logits: Tensor, labels: Tensor) -> Tensor:
        return ignoring(logits, labels) if bool((labels != IGNORED).any()) else logits.square().mean()

    with pytest.raises(UsageError, match="6 of 8 shards have a loss with weights of its own"):
        trained_by(sometimes)


@pytest.mark.parametrize("loss_fn", [ignoring, masked])
def test_a_single_shard_has_the_bits_of_the_plain_loop(loss_fn: Loss) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)

    def run() -> None:
        enter_session(SoloSession())
        loop = ElasticLoop(trained, optimizer, dataset(), batch_size=BATCH, num_shards=1, shuffle=False)
        for iteration in loop:
            for x, y in iteration.shards():
                iteration.backward(loss_fn(trained(x), y))
            if iteration.exchange():
                optimizer.step()

    Context().run(run)
    assert torch.equal(nn.utils.parameters_to_vector(trained.parameters()), plain(loss_fn))


def test_a_weight_below_0_is_refused() -> None:
    with pytest.raises(UsageError, match="weigh"):
        weigh(torch.tensor(-1.0))
