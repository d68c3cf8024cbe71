"""Training that would be wrong in silence is refused by name: each case fails loudly, and what is right passes."""

from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.training import ElasticLoop, ElasticModel, Iteration, seed
from resile_learner.lone_training import STEPS, LoneTraining
from resile_learner.training.seeds import mix
from resile_learner.training.watch.losses import LossIsASum
from resile_shared.errors import UsageError

from .shard_bodies import prepare

Loss = Callable[[Tensor, Tensor], Tensor]
Schedule = Callable[[torch.optim.Optimizer], Any]


def data() -> TensorDataset:
    seed(0)
    return TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))


def by_loop(
    loss_fn: Loss = F.cross_entropy,
    *,
    make_schedule: Schedule | None = None,
    update: Callable[[nn.Module, Iteration], object] = lambda model, iteration: None,
) -> None:
    """Train by `ElasticLoop`: 4 epochs of 4 iterations."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = make_schedule(optimizer) if make_schedule else None
        state = {"schedule": schedule} if schedule else {}
        loop = ElasticLoop(model, optimizer, data(), epochs=4, batch_size=16, num_shards=2, state=state)
        for iteration in loop:
            for inputs, targets in iteration.shards():
                iteration.backward(loss_fn(model(inputs), targets))
            if iteration.exchange():
                update(model, iteration)
                optimizer.step()
                if schedule:
                    schedule.step()

    Context().run(run)


def by_call(loss_fn: Loss = F.cross_entropy, *, make_schedule: Schedule | None = None) -> None:
    """The same by `ElasticModel`."""

    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = make_schedule(optimizer) if make_schedule else None
        ElasticModel(model, lambda: (data(), None), loss_fn, optimizer, schedule).train(
            epochs=4, batch_size=16, num_shards=2
        )

    Context().run(run)


def by_prepare(
    loss_fn: Loss = F.cross_entropy, *, make_schedule: Schedule | None = None, each_epoch: bool = False
) -> None:
    """The same by `prepare`; the schedule steps in the loop over the loader, or after it."""

    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = make_schedule(optimizer) if make_schedule else torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        _, _, loader, _ = prepare(model, optimizer, DataLoader(data(), batch_size=16), schedule, num_shards=2)
        for _ in loader.epochs(4):
            for inputs, targets in loader:
                loss_fn(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if not each_epoch:
                    schedule.step()
            if each_epoch:
                schedule.step()

    Context().run(run)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def ends_with_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square().sum()


def half_of_a_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 0] - targets).square().sum()


def a_term_is_summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """As that of many variational autoencoders."""
    wanted = F.one_hot(targets, 2).float()
    penalty = -0.5 * outputs.square().sum()
    return F.binary_cross_entropy_with_logits(outputs, wanted, reduction="sum") + 0.1 - penalty


@pytest.mark.parametrize("train", [by_loop, by_call, by_prepare])
@pytest.mark.parametrize("loss_fn", [summed, ends_with_sum, a_term_is_summed])
def test_a_loss_that_is_a_sum_is_refused(train: Callable[[Loss], None], loss_fn: Loss) -> None:
    with pytest.raises(LossIsASum, match="not a mean"):
        train(loss_fn)


def test_a_loss_function_that_doubles_with_its_batch_is_refused() -> None:
    with pytest.raises(LossIsASum, match="for the same batch twice over"):
        by_call(half_of_a_sum)


PENALIZED = nn.Parameter(torch.ones(32, 4))
"""Weights of as many rows as a batch has samples."""
MEANS: list[Loss] = [
    lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=0.1),
    lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum") / len(targets),
    lambda outputs, targets: (outputs[:, 0] - targets).square().sum() / len(targets),
    lambda outputs, targets: torch.stack([F.cross_entropy(outputs, targets)] * 8).sum(),
    lambda outputs, targets: F.cross_entropy(outputs, targets) + outputs.square().mean(),
    lambda outputs, targets: F.cross_entropy(outputs, targets) + 0.0001 * PENALIZED.square().sum(),
    lambda outputs, targets: F.cross_entropy(outputs, targets) + PENALIZED.abs().sum(),
    lambda outputs, targets: (
        F.cross_entropy(outputs, targets) + F.l1_loss(PENALIZED, torch.zeros(32, 4), reduction="sum")
    ),
]


@pytest.mark.parametrize("train", [by_loop, by_call, by_prepare])
@pytest.mark.parametrize("loss_fn", MEANS)
def test_means_of_all_kinds_train(train: Callable[[Loss], None], loss_fn: Loss) -> None:
    train(loss_fn)


SCHEDULES: dict[str, Schedule] = {
    "T_max": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
    "total_iters": lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=4),
}


@pytest.mark.parametrize("train", [by_loop, by_call, by_prepare])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_for_epochs_that_is_stepped_each_iteration_is_refused_as_soon_as_that_is_known(
    train: Any, name: str
) -> None:
    schedules = []

    def make(optimizer: torch.optim.Optimizer) -> Any:
        schedules.append(SCHEDULES[name](optimizer))
        return schedules[0]

    with pytest.raises(UsageError, match=rf"is made for the 4 epochs of this run \({name}\) and stepped once an iter"):
        train(make_schedule=make)
    assert schedules[0].last_epoch == (0 if train is by_call else 2)


@pytest.mark.parametrize("train", [by_loop, by_call, by_prepare])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]),
    ],
)
def test_a_cosine_that_rises_again_and_milestones_that_are_long_past_train(train: Any, make: Schedule) -> None:
    train(make_schedule=make)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_for_epochs_steps_between_them(name: str) -> None:
    by_prepare(make_schedule=SCHEDULES[name], each_epoch=True)


@pytest.mark.parametrize("steps", [5, 16, 20])
def test_a_schedule_for_iterations_steps_in_each(steps: int) -> None:
    by_loop(make_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps))


@pytest.mark.parametrize("adds", ["parameter", "layer"])
def test_parameters_that_the_model_gets_later_are_refused(adds: str) -> None:
    def update(model: nn.Module, iteration: Iteration) -> None:
        if iteration.number == 1:
            model.append(nn.Linear(2, 2) if adds == "layer" else nn.ParameterList([torch.zeros(2)]))  # type: ignore[operator]

    with pytest.raises(UsageError, match="the model got other parameters after the training call began"):
        by_loop(update=update)


def test_a_second_exchange_is_refused() -> None:
    with pytest.raises(UsageError, match="called a second time"):
        by_loop(update=lambda model, iteration: iteration.exchange())


def test_random_numbers_of_an_update_do_not_depend_on_the_shards_of_a_worker() -> None:
    seeds: list[int] = []
    by_loop(update=lambda model, iteration: seeds.append(torch.initial_seed()))
    assert seeds == [mix(0, "update", number) for number in range(16)]


@pytest.mark.parametrize("calls", [True, False])
def test_a_script_that_trains_before_its_training_call_is_named_once(calls: bool) -> None:
    reports: list[str] = []
    lone = LoneTraining(is_called=lambda: calls, report=reports.append)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    try:
        for _ in range(2 * STEPS):
            optimizer.step()
    finally:
        lone.hook.remove()
    assert len(reports) == (0 if calls else 1)
    assert all("each worker is running this script alone" in report for report in reports)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_that_the_training_call_was_not_given_is_named(is_enabled: bool) -> None:
    def run() -> Any:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=8)
        _, _, loader = prepare(model, optimizer, samples, num_shards=2)
        scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
        for _ in loader.epochs(1):
            for (inputs,) in loader:
                scaler.scale(model(inputs).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        return loader.result

    if is_enabled:
        with pytest.raises(UsageError, match=r"GradScaler that the training call was not given.*grad_scaler=scaler"):
            Context().run(run)
    else:
        assert Context().run(run).iterations == 3
