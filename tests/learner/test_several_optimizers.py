"""Several models and optimizers in one loop: the bits of the plain loop, each with its own exchange; mistakes named."""

from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.training import seed
from resile_learner.training.data.batches import BatchPlan
from resile_learner.training.digest import params_sha256
from resile_learner.training.seeds import mix, seed_all
from resile_shared.errors import UsageError

from .shard_bodies import prepare

EPOCHS = 3


def data() -> TensorDataset:
    return TensorDataset(torch.randn(40, 2, generator=torch.Generator().manual_seed(0)))


class Pair:
    """A discriminator and a generator with dropout, and a body that trains them in turns."""

    def __init__(self) -> None:
        seed(0)
        self.models = [nn.Linear(2, 1), nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))]
        self.first = torch.optim.Adam(self.models[0].parameters(), lr=0.01)
        self.second = torch.optim.Adam(self.models[1].parameters(), lr=0.02)
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in (self.first, self.second)]

    def losses(self, real: Tensor) -> tuple[Tensor, Tensor]:
        discriminator, generator = self.models
        fake = generator(torch.randn(len(real), 3))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        on_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        return on_real + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros), fake

    def loss_of_generator(self, fake: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.models[0](fake), torch.ones(len(fake), 1))

    def body(self, real: Tensor) -> None:
        self.first.zero_grad()
        loss, fake = self.losses(real)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.models[0].parameters(), 0.5)
        self.first.step()
        self.schedules[0].step()
        self.second.zero_grad()
        self.loss_of_generator(fake).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.models[1].parameters(), 0.5)
        self.second.step()
        self.schedules[1].step()

    def sha(self) -> str:
        return params_sha256(nn.ModuleList(self.models))


def plainly() -> str:
    """The same loop without Resile: its batches in the same order, its random numbers seeded alike."""
    pair = Pair()
    order = BatchPlan(40, 16, 1, seed=0)
    for number in range(EPOCHS * order.per_epoch):
        batch = order.batch(order.position(number))
        seed_all(mix(0, "compute", number, 0))
        pair.body(data().tensors[0][batch.indices])
    return pair.sha()


def elastically(num_shards: int, body: Any = None) -> tuple[str, Any]:
    def run() -> tuple[str, Any]:
        pair = Pair()
        prepared = prepare(
            pair.models,
            [pair.first, pair.second],
            DataLoader(data(), batch_size=16, shuffle=True),
            pair.schedules,
            num_shards=num_shards,
        )
        loader = prepared[2]
        whole = 0
        for _ in loader.epochs(EPOCHS):
            for (real,) in loader:
                (body or Pair.body)(pair, real)
                whole += loader.sync_gradients
        assert loader.result.params_sha256 == pair.sha()
        return pair.sha(), (loader, len(loader), whole, pair)

    outcome: tuple[str, Any] = Context().run(run)
    return outcome


def test_two_optimizers_that_take_turns_have_the_bits_of_the_plain_loop() -> None:
    assert elastically(1)[0] == Context().run(plainly)


def test_each_optimizer_has_an_iteration_of_each_batch() -> None:
    _, (loader, length, whole, pair) = elastically(4)
    assert loader.result.iterations == 2 * EPOCHS * 3
    assert loader.result.samples_seen == EPOCHS * 40
    assert whole == EPOCHS * 3, "sync_gradients is true once a batch"
    assert [schedule.last_epoch for schedule in pair.schedules] == [EPOCHS * 3] * 2
    assert length == 2 * (4 + 4 + 2)


def swapped(pair: Pair, real: Tensor) -> None:
    loss, fake = pair.losses(real)
    loss.backward()  # type: ignore[no-untyped-call]
    pair.second.step()
    pair.loss_of_generator(fake).backward()  # type: ignore[no-untyped-call]
    pair.first.step()


def once(pair: Pair, real: Tensor) -> None:
    pair.losses(real)[0].backward()  # type: ignore[no-untyped-call]
    pair.first.step()


def thrice(pair: Pair, real: Tensor) -> None:
    pair.body(real)
    pair.losses(real)[0].backward()  # type: ignore[no-untyped-call]


def real_and_fake_apart(pair: Pair, real: Tensor) -> None:
    for loss in pair.losses(real)[0], pair.losses(real)[0]:
        loss.backward()  # type: ignore[no-untyped-call]
    pair.first.step()


def unstepped(pair: Pair, real: Tensor) -> None:
    loss, fake = pair.losses(real)
    loss.backward()  # type: ignore[no-untyped-call]
    pair.first.step()
    pair.loss_of_generator(fake).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (swapped, "optimizer number 1 was stepped after 1 backward passes.*in the order in which the body steps them"),
        (once, "a batch ended after 1 of 2 backward passes"),
        (real_and_fake_apart, r"stepped after 2 backward passes.*as in `\(loss_real \+ loss_fake\).backward\(\)`"),
        (thrice, r"backward\(\) was called 3 times for a batch"),
        (unstepped, r"an iteration ended without optimizer.step\(\)"),
    ],
)
def test_a_body_that_does_not_take_turns_is_named(body: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        elastically(2, body)
