"""An ordinary loop with one more line: the bits of `ElasticLoop`, and wrong use named."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from resile import training
from resile.training import Callback, ElasticLoader, ElasticLoop, ElasticModel, Iteration, seed
from resile_learner.hints import hint_about_gradients
from resile_learner.messages import Ready
from resile_learner.session import SoloSession, complete_left, enter_session
from resile_learner.state.flat import unflatten
from resile_learner.state.run import RunState
from resile_learner.training.reports import Result
from resile_learner.training.seeds import mix
from resile_shared.errors import UsageError

from .recorded_sessions import Losing, Recorded
from .shard_bodies import prepare

EPOCHS = 3
BATCHES: Any = [[1, 2], [3]]
WEIGHTED = WeightedRandomSampler([1.0 + index % 3 for index in range(45)], num_samples=60)


def alone(call: Callable[[], Any]) -> Any:
    """Run ``call`` as a script of its own, with its one training call."""
    return Context().run(call)


def data(size: int = 45) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.002}], lr=0.01)


def ordinary(
    loader: DataLoader[Any],
    *,
    epochs: int = EPOCHS,
    each_batch: Callable[[ElasticLoader], object] = lambda loader: None,
    each_epoch: Callable[[ElasticLoader, nn.Module], object] = lambda loader, model: None,
    **options: Any,
) -> str:
    """Train by an ordinary loop."""

    def run() -> str:
        model = network()
        optimizer = two_groups(model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        prepared, stepper, shards, schedule = prepare(model, optimizer, loader, scheduler, **options)
        for _ in shards.epochs(epochs):
            prepared.train()
            running = 0.0
            for inputs, targets in shards:
                stepper.zero_grad()
                loss = F.cross_entropy(prepared(inputs), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(prepared.parameters(), 0.5)
                stepper.step()
                schedule.step()
                running += loss.item()
                each_batch(shards)
            each_epoch(shards, prepared)
        assert shards.result is not None
        sha = shards.result.params_sha256
        assert isinstance(sha, str)
        return sha

    sha = alone(run)
    assert isinstance(sha, str)
    return sha


def by_hand(dataset: TensorDataset, **settings: Any) -> str:
    """Train by `ElasticLoop`."""

    def run() -> str:
        model = network()
        optimizer = two_groups(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        loop = ElasticLoop(model, optimizer, dataset, epochs=EPOCHS, state={"scheduler": schedule}, **settings)
        for iteration in loop:
            for inputs, targets in iteration.shards():
                iteration.backward(F.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
        assert loop.result is not None
        return loop.result.params_sha256

    sha = alone(run)
    assert isinstance(sha, str)
    return sha


@pytest.mark.parametrize(
    ("loader", "options", "settings"),
    [
        ({"batch_size": 16, "shuffle": True}, {}, {"batch_size": 16}),
        ({"batch_size": 16, "shuffle": True}, {"num_shards": 4}, {"batch_size": 16, "num_shards": 4}),
        ({"batch_size": 4, "shuffle": True}, {"accumulate": 3}, {"batch_size": 12, "num_shards": 3}),
        ({"batch_size": 16}, {"num_shards": 3}, {"batch_size": 16, "num_shards": 3, "shuffle": False}),
        (
            {"batch_size": 16, "shuffle": True, "drop_last": True},
            {"seed": 3},
            {"batch_size": 16, "drop_last": True, "seed": 3},
        ),
        ({"batch_size": 16, "shuffle": True, "num_workers": 1}, {}, {"batch_size": 16, "num_workers": 1}),
        ({"batch_size": 16, "shuffle": True}, {"mode": "fast"}, {"batch_size": 16, "mode": "fast"}),
        ({"batch_size": 16, "sampler": WEIGHTED}, {}, {"batch_size": 16, "sampler": WEIGHTED}),
        (
            {"batch_sampler": BatchSampler(WEIGHTED, 16, drop_last=True)},
            {"num_shards": 3},
            {"batch_size": 16, "sampler": WEIGHTED, "num_shards": 3, "drop_last": True},
        ),
    ],
)
def test_an_ordinary_loop_gives_the_bits_of_the_elastic_loop(
    loader: dict[str, Any], options: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert ordinary(DataLoader(data(), **loader), **options) == by_hand(data(), **settings)


def test_a_loader_yields_the_shards_and_counts_them() -> None:
    counts: list[int] = []
    lengths: set[int] = set()

    def count(loader: ElasticLoader) -> None:
        counts.append(loader.iteration)
        lengths.add(len(loader))

    ordinary(DataLoader(data(), batch_size=16, shuffle=True), num_shards=4, each_batch=count)
    assert lengths == {12}
    again = [0] * 7 + [1] * 3 + [8] * 3 + [2, 3, 4, 6, 8]
    """What does not count: rows in two parts and at once, also for BatchNorm; the first shard, as it is compared."""
    assert Counter(counts) == Counter([*range(9), *range(9), *range(9), *range(9), *again])


def test_gradients_are_whole_after_the_last_shard_of_an_iteration() -> None:
    whole: list[bool] = []
    ordinary(
        DataLoader(data(48), batch_size=16),
        num_shards=2,
        epochs=1,
        each_batch=lambda loader: whole.append(loader.sync_gradients),
    )
    assert sum(whole) == 3
    assert whole[-2:] == [False, True]


def wrong_batch(optimizer: Any, loss: torch.Tensor, number: int, mistake: str) -> None:
    """Backward pass and update of a batch, with a mistake."""
    loss.backward(retain_graph=True)
    if mistake == "twice":
        loss.backward()
    if mistake == "closure":
        optimizer.step(lambda: loss)
    if mistake != "accumulates" or number % 4 == 3:
        optimizer.step()
    if mistake == "steps twice":
        optimizer.step()


def wrong(loader: ElasticLoader, model: nn.Module, optimizer: Any, mistake: str) -> None:
    """A loop with a mistake."""
    for epoch in loader.epochs(2):
        if mistake == "no loop":
            continue
        for number, (inputs, targets) in enumerate(loader):
            if mistake == "skips" and number == 1:
                continue
            wrong_batch(optimizer, F.cross_entropy(model(inputs), targets), number, mistake)
            if mistake == "breaks" and number == 1:
                break
            if mistake == "stops early" and number == 1:
                loader.stop()
        if mistake == "steps late" and epoch == 0:
            optimizer.step()
    if mistake == "again":
        next(loader.epochs(2))


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("no loop", "an epoch ended without a loop over the loader"),
        ("skips", r"a batch ended without loss.backward\(\).*torch.autograd.grad .*resile.training.undivided\(\)"),
        ("twice", r"backward\(\) was called twice for a batch.*such as SAM, use prepare\(\) without body=.shard"),
        ("closure", r"optimizer.step\(closure\) was called outside of a batch, twice in a batch, or after"),
        (
            "accumulates",
            r"optimizer.step\(\) was called in some batches of an iteration and not.*accumulate=... of prepare",
        ),
        ("steps twice", "called 2 times in one iteration"),
        ("steps late", "called 2 times in one iteration"),
        ("breaks", r"left at iteration 0, before the end of epoch 0.* call loader.stop\(\) instead of `break`"),
        ("breaks", r"to use fewer batches in each epoch, give prepare\(\) a DataLoader of a torch.utils.data.Subset"),
        ("again", "a script has one training call"),
        ("stops early", r"loader.stop\(\) was called in the middle of iteration 0.*if loader.sync_gradients and"),
    ],
)
def test_a_mistake_in_the_loop_is_named(mistake: str, complaint: str) -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer, loader = prepare(model, optimizer, DataLoader(data(32), batch_size=16), num_shards=3)
        wrong(loader, model, optimizer, mistake)

    with pytest.raises(UsageError, match=complaint):
        alone(run)


@pytest.mark.parametrize("looks_first", [False, True])
def test_a_second_loop_over_the_loader_in_an_epoch_is_refused(looks_first: bool) -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer, loader = prepare(model, optimizer, DataLoader(data(32), batch_size=16), num_shards=3)
        for _ in loader.epochs(2):
            if looks_first:
                next(iter(loader))
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            with torch.no_grad():
                [model(inputs) for inputs, _ in loader]

    with pytest.raises(
        UsageError, match=r"iterated a second time in one epoch.*another DataLoader, such as the one that"
    ):
        alone(run)


def swallowing(loader: ElasticLoader, model: nn.Module, optimizer: Any, mistake: str) -> None:
    """The same with a body that catches everything."""
    for _ in loader.epochs(2):
        for number, (inputs, targets) in enumerate(loader):
            with suppress(Exception):
                if mistake == "sum":
                    F.cross_entropy(model(inputs), targets, reduction="sum").backward()
                wrong_batch(optimizer, F.cross_entropy(model(inputs), targets), number, mistake)
                if mistake == "stops early":
                    loader.stop()


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("sum", "the loss is a sum over its batch"),
        ("twice", r"backward\(\) was called twice for a batch"),
        ("closure", r"optimizer.step\(closure\) was called outside of a batch, twice in a batch, or after"),
        ("stops early", r"loader.stop\(\) was called in the middle"),
    ],
)
def test_a_body_that_catches_its_refusal_is_refused_again_by_the_same_words(mistake: str, complaint: str) -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer, loader = prepare(model, optimizer, DataLoader(data(32), batch_size=16), num_shards=3)
        swallowing(loader, model, optimizer, mistake)

    with pytest.raises(UsageError, match=complaint):
        alone(run)


def test_statistics_of_an_average_are_computed_after_training_with_another_loader() -> None:
    def run(own: bool) -> float:
        model, plain = network(), DataLoader(data(32), batch_size=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        _, _, loader = prepare(model, optimizer, plain, state={"ema": ema})
        for _ in loader.epochs(2):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                if loader.sync_gradients:
                    ema.update_parameters(model)
        update_bn(loader if own else plain, ema)
        return float(ema.module[1].running_mean.sum())

    assert alone(partial(run, False)) != 0.0
    with pytest.raises(
        UsageError, match=r"after training was complete.*or for torch.optim.swa_utils.update_bn, use ano"
    ):
        alone(partial(run, True))


def test_clipping_by_value_clips_the_gradients_of_the_global_batch() -> None:
    """Also where the script has imported the function by name, and before the last shard, where no gradients are."""

    def shares(clip_value: float) -> str:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        _, _, loader = prepare(model, optimizer, DataLoader(data(32), batch_size=16), num_shards=4)
        for _ in loader.epochs(2):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                clip_grad_value_(model.parameters(), clip_value)
                optimizer.step()
        assert loader.result is not None
        return str(loader.result.params_sha256)

    def by_iteration() -> str:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loop = ElasticLoop(model, optimizer, data(32), epochs=2, batch_size=16, num_shards=4, shuffle=False)
        for iteration in loop:
            for inputs, targets in iteration.shards():
                iteration.backward(F.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
        assert loop.result is not None
        return loop.result.params_sha256

    assert alone(partial(shares, 0.01)) == alone(by_iteration) != alone(partial(shares, 1e9))
    with pytest.raises(RuntimeError, match="empty"):  # PyTorch's own again
        clip_grad_value_([nn.Parameter(torch.zeros(1))], 1.0)


def fails_in_a_loop_by_hand(model: nn.Module, fail: Callable[[nn.Module], object]) -> None:
    loop = ElasticLoop(model, torch.optim.SGD(model.parameters()), data(32), batch_size=16, num_shards=4)
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(F.cross_entropy(model(inputs), targets))
            fail(model)


def fails_after_backward(model: nn.Module, fail: Callable[[nn.Module], object]) -> None:
    _, _, loader = prepare(
        model, torch.optim.SGD(model.parameters()), DataLoader(data(32), batch_size=16), num_shards=4
    )
    for _ in loader.epochs(2):
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            fail(model)


def fails_before_backward(model: nn.Module, fail: Callable[[nn.Module], object]) -> None:
    _, _, loader = prepare(model, torch.optim.SGD(model.parameters()), DataLoader(data(32), batch_size=16))
    for _ in loader.epochs(2):
        for _ in loader:
            fail(model)


def norms(model: nn.Module) -> object:
    return torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None])


def first_norm(model: nn.Module) -> object:
    return next(model.parameters()).grad.norm()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("train", "fail", "hint"),
    [
        (fails_in_a_loop_by_hand, norms, "after iteration.exchange()"),
        (fails_after_backward, norms, "write `if loader.sync_gradients:` before"),
        (fails_after_backward, first_norm, "write `if loader.sync_gradients:` before"),
        (fails_after_backward, lambda model: 1 / 0, ""),
        (fails_before_backward, first_norm, ""),
    ],
)
def test_gradients_that_are_not_there_yet_are_told_with_the_remedy(
    train: Callable[..., None], fail: Callable[[nn.Module], object], hint: str
) -> None:
    """Whatever error they lead to; not in a batch before its backward pass, and not by lines without gradients."""

    def run() -> str:
        session = SoloSession()
        enter_session(session)
        with pytest.raises((AttributeError, RuntimeError, ZeroDivisionError)) as caught:
            train(network(), fail)
        assert session.prepared is not None
        return hint_about_gradients(caught.value, session.prepared)

    found = alone(run)
    assert hint in found
    assert bool(hint) == bool(found)


def test_further_schedules_are_refused_with_what_to_write() -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
        prepare(model, optimizer, DataLoader(data(32), batch_size=16), first, second)

    with pytest.raises(UsageError, match=r"several in a list.*\[warmup, plateau\]"):
        alone(run)


def test_two_schedules_in_a_list_step_once_an_iteration_and_once_an_epoch() -> None:
    def run() -> tuple[int, int]:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        each_batch = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        each_epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        plain = DataLoader(data(32), batch_size=16)
        _, _, loader, schedules = prepare(model, optimizer, plain, [each_batch, each_epoch], num_shards=4)
        for _ in loader.epochs(2):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                schedules[0].step()
            schedules[1].step(loader.loss)
        return each_batch.last_epoch, each_epoch.last_epoch

    assert alone(run) == (4, 2)


@pytest.mark.parametrize("again", ["loader", "all"])
def test_a_second_prepare_is_refused(again: str) -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = DataLoader(data(32), batch_size=16)
        _, _, loader = prepare(model, optimizer, plain)
        prepare(nn.Linear(4, 2), optimizer, loader if again == "loader" else plain)

    with pytest.raises(UsageError, match=r"prepare\(\) was called a second time"):
        alone(run)


def test_a_plain_range_of_epochs_is_refused_at_once() -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        _, _, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=16))
        for _ in range(10):
            for _ in loader:
                pass

    with pytest.raises(UsageError, match=r"write `for epoch in loader.epochs\(10\):`"):
        alone(run)


class Stateful(torch.utils.data.Sampler[int]):
    """Goes on where it was."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Any:
        self.start += 1
        return iter(range(self.start, self.start + 40))

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize(
    ("loader", "options", "complaint"),
    [
        ([1, 2], {}, "the loader is a list"),
        (DataLoader(data(), batch_size=None), {}, "the loader has batch_size=None"),
        (DataLoader(data(), batch_sampler=BATCHES), {"accumulate": 2}, "accumulate and a loader with a batch sampler"),
        (DataLoader(data(), batch_size=4, sampler=DistributedSampler(data(), 2, 0)), {}, "a DistributedSampler"),
        (DataLoader(data(), batch_size=4, sampler=Stateful()), {}, "yields other indices each time"),
        (DataLoader(data(), batch_size=4), {"accumulate": 0}, "accumulate is 0"),
        (DataLoader(data(), batch_size=4), {"accumulate": 2, "num_shards": 2}, "both accumulate and num_shards"),
        (DataLoader(data(), batch_size=4), {"num_shards": 5}, "num_shards is 5 for a batch of 4"),
        (DataLoader(data(), batch_size=46, drop_last=True), {}, "drop_last leaves nothing"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_prepared(loader: Any, options: dict[str, Any], complaint: str) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=complaint):
        alone(lambda: prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **options))


class Noam:
    """A schedule that steps the optimizer that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize(
    "train",
    [
        lambda model, optimizer, dataset: prepare(model, optimizer, DataLoader(dataset, batch_size=4)),
        lambda model, optimizer, dataset: training.prepare(model, optimizer, DataLoader(dataset, batch_size=4)),
        lambda model, optimizer, dataset: ElasticLoop(model, optimizer, dataset, batch_size=4),
    ],
)
def test_a_wrapper_of_an_optimizer_is_refused_with_what_to_pass(train: Callable[..., object]) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"a Noam as optimizer, which has no param_groups: pass optimizer.optimizer"):
        alone(lambda: train(model, Noam(torch.optim.SGD(model.parameters())), data()))


@pytest.mark.parametrize("is_given", [True, False])
def test_a_step_within_the_backward_pass_of_a_shard_is_refused(is_given: bool) -> None:
    model = nn.Linear(4, 2)
    each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    for parameter, own in zip(model.parameters(), each, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[misc]
    given = each if is_given else [torch.optim.SGD(model.parameters(), lr=0.1)]

    def run() -> None:
        _, _, loader = prepare(model, given, DataLoader(data(32), batch_size=16), num_shards=4)
        for _ in loader.epochs(1):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()

    with pytest.raises(UsageError, match=r"stepped within backward\(\), as by a hook .*without body=.shard"):
        alone(run)


def test_a_layer_that_scales_its_rows_in_each_shard_is_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=0.1), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        _, _, loader = prepare(model, optimizer, DataLoader(data(32), batch_size=16), num_shards=4)
        for _ in loader.epochs(1):
            for _, targets in loader:
                F.cross_entropy(model(targets), targets).backward()
                optimizer.step()

    with pytest.raises(UsageError, match="the layer 0 has max_norm, by which its forward pass scales rows"):
        alone(run)


def test_stop_ends_the_run_with_the_iteration() -> None:
    ended: list[int] = []

    def stop(loader: ElasticLoader) -> None:
        if loader.sync_gradients and loader.iteration == 4:
            loader.stop()

    ordinary(
        DataLoader(data(), batch_size=16),
        each_batch=stop,
        each_epoch=lambda loader, _: ended.append(loader.iteration),
    )
    assert ended == [2, 4], "the end of the epoch still belongs to the last iteration"


def test_stop_between_epochs_ends_the_run_with_the_epoch() -> None:
    ended: list[int] = []

    def stop(loader: ElasticLoader, model: nn.Module) -> None:
        ended.append(loader.iteration)
        if len(ended) == 2:
            loader.stop()

    ordinary(DataLoader(data(), batch_size=16), each_epoch=stop)
    assert ended == [2, 5]


def test_random_numbers_between_epochs_do_not_depend_on_the_shards_of_a_worker() -> None:
    seeds: list[int] = []
    ordinary(DataLoader(data(), batch_size=16), each_epoch=lambda *_: seeds.append(torch.initial_seed()))
    assert seeds == [mix(0, "epoch", epoch) for epoch in range(EPOCHS)]


def test_backward_is_pytorchs_own_again_after_each_batch() -> None:
    own = torch.autograd.backward
    in_batches: list[object] = []
    between: list[object] = []
    ordinary(
        DataLoader(data(), batch_size=16),
        each_batch=lambda _: in_batches.append(torch.autograd.backward),
        each_epoch=lambda *_: between.append(torch.autograd.backward),
    )
    assert own not in in_batches
    assert [*between, torch.autograd.backward] == [own] * 4


@pytest.mark.parametrize("lost_round", [1, 2, 3, 5])
def test_a_worker_that_was_behind_at_the_end_of_an_epoch_goes_on_with_the_state_of_the_others(lost_round: int) -> None:
    """Round 0 compares facts, and an epoch has two iterations. The schedule stepped there, and does not step again."""

    def run(session: Recorded) -> tuple[str, list[tuple[int, float]]]:
        enter_session(session)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        _, _, loader, _ = prepare(model, optimizer, DataLoader(data(32), batch_size=16, shuffle=True), schedule)
        ends = []
        for epoch in loader.epochs(EPOCHS):
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            schedule.step()
            ends.append((epoch, optimizer.param_groups[0]["lr"]))
        return loader.result.params_sha256, ends

    ahead = Recorded()
    undisturbed = alone(lambda: run(ahead))
    assert undisturbed[1] == [(0, 0.5), (1, 0.25), (2, 0.125)]
    assert alone(lambda: run(Losing(lost_round, ahead.at_boundary[lost_round + 1]))) == undisturbed


class Waited:
    """A part of the state that counts, as early stopping does."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("lost_round", [1, 2, 4])
def test_a_worker_that_was_behind_at_the_end_of_an_epoch_counts_it_once(lost_round: int) -> None:
    """What it received counts the epoch already, and the script of this worker counts it as well."""

    def run(session: Recorded) -> list[int]:
        enter_session(session)
        model = network()
        model.epochs = 0
        waited = Waited()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(data(32), batch_size=16)
        _, _, loader = prepare(model, optimizer, loader, state={"waited": waited})
        counts = []
        for _ in loader.epochs(EPOCHS):
            for inputs, targets in loader:
                counts.append(waited.epochs)
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                assert model.epochs == waited.epochs
            waited.epochs += 1
            model.epochs += 1
        return counts

    ahead = Recorded()
    undisturbed = alone(lambda: run(ahead))
    counts = alone(lambda: run(Losing(lost_round, ahead.at_boundary[lost_round + 1])))
    assert isinstance(counts, list)
    assert isinstance(undisturbed, list)
    assert sorted(set(counts)) == sorted(set(undisturbed)) == [0, 1, 2]
    assert counts == sorted(counts)
    assert counts[-2:] == [2, 2]


def test_the_state_has_the_modes_of_training_where_one_worker_alone_validates() -> None:
    """Members store parts of one checkpoint, so their states have the same bytes."""

    def run(session: Recorded, *, validates: bool) -> list[Any]:
        enter_session(session)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, _, loader = prepare(model, optimizer, DataLoader(data(32), batch_size=16))
        for epoch in loader.epochs(EPOCHS):
            model.train()
            if epoch:
                model[1].eval()
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            if validates:
                model.eval()
        return [unflatten(*state)["modules"] for state in session.at_boundary.values()]

    validating, other = (alone(lambda each=each: run(Recorded(), validates=each)) for each in (True, False))
    assert validating == other
    assert [states["1"]["training"] for states in other] == [True] * 4 + [False] * 5


LEFT_EARLY = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from resile.training import prepare

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=16)
_, optimizer, loader = prepare(model, optimizer, loader, num_shards=2, body="shard")
for _ in loader.epochs(2):
    for (inputs,) in loader:
        model(inputs).mean().backward()
        optimizer.step()
        if {leaves}:
            break
    {ending}
"""


@pytest.mark.parametrize(
    ("leaves", "ending", "says"),
    [
        ("False", "break", "completed: params_sha256"),
        ("loader.sync_gradients", "break", "completed: params_sha256"),
        ("not loader.sync_gradients", "break", "left in the middle of iteration 0"),
        ("False", "loader.stop()", "completed: params_sha256"),
        ("False", "1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plain_run_that_is_left_early_is_complete_or_says_why_not(
    leaves: str, ending: str, says: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEFT_EARLY.format(leaves=leaves, ending=ending))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    ends = ("completed: params_sha256", "left in the middle of iteration 0", "ZeroDivisionError")
    assert [end for end in ends if end in done.stderr] == [says]


def left(place: str, session: SoloSession, *, then: Callable[[ElasticLoader, nn.Module], object]) -> Result:
    """The result of a loop of two iterations per epoch that ends in epoch 1 at ``place``, and goes on with ``then``."""

    def run() -> Result:
        enter_session(session)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        _, _, loader, _ = prepare(model, optimizer, DataLoader(data(32), batch_size=16, shuffle=True), schedule)
        for epoch in loader.epochs(EPOCHS):
            if place == "start" and epoch == 2:
                break
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                if place == "batch" and loader.sync_gradients and loader.iteration == 2:
                    break
            if place == "batch" and loader.iteration == 2:
                break
            schedule.step()
            if place == "stop" and epoch == 1:
                loader.stop()
            if place == "epoch" and epoch == 1:
                break
        then(loader, model)
        assert loader.result is not None
        return loader.result

    result = alone(run)
    assert isinstance(result, Result)
    return result


def nothing(loader: ElasticLoader, model: nn.Module) -> None:
    """What follows a loop in a script that only asks for the result."""


def test_leaving_the_loop_is_stopping_after_the_newest_iteration() -> None:
    stopped = left("stop", SoloSession(), then=nothing)
    assert left("epoch", SoloSession(), then=nothing) == left("start", SoloSession(), then=nothing) == stopped
    assert (stopped.iterations, left("batch", SoloSession(), then=nothing).iterations) == (4, 3)


@pytest.mark.parametrize("lost_round", [3, 4])
@pytest.mark.parametrize("place", ["epoch", "start"])
def test_a_worker_that_was_behind_leaves_the_loop_with_the_others(place: str, lost_round: int) -> None:
    """Round 4 is the last iteration of epoch 1, which ends the run."""
    ahead = Recorded()
    undisturbed = left(place, ahead, then=nothing)
    assert left(place, Losing(lost_round, ahead.at_boundary[lost_round + 1]), then=nothing) == undisturbed


def test_what_a_script_loads_after_its_loop_does_not_change_the_result() -> None:
    def load(loader: ElasticLoader, model: nn.Module) -> None:
        torch.save(model, BytesIO())
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})

    result = left("epoch", SoloSession(), then=load)
    assert result == left("stop", SoloSession(), then=nothing)


def test_a_model_that_is_changed_in_place_after_its_loop_is_not_taken_for_the_result() -> None:
    def change(loader: ElasticLoader, model: nn.Module) -> None:
        next(model.parameters()).data.zero_()

    with pytest.raises(UsageError, match=r"the model was changed after the loop over loader.epochs\(\) was left"):
        left("epoch", SoloSession(), then=change)


def test_leaving_a_loop_that_something_still_refers_to_is_refused() -> None:
    def run() -> None:
        session = SoloSession()
        enter_session(session)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, _, loader = prepare(model, optimizer, DataLoader(data(32), batch_size=16, shuffle=True))
        held = loader.epochs(EPOCHS)
        for _ in held:
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            break
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        complete_left(session)

    with pytest.raises(UsageError, match="something still refers to it"):
        alone(run)


def test_the_loader_of_a_loop_that_was_left_yields_nothing_more() -> None:
    with pytest.raises(UsageError, match="was used after training was complete"):
        left("epoch", SoloSession(), then=lambda loader, model: next(iter(loader)))


def test_a_worker_that_leaves_the_loop_and_gets_the_state_of_one_that_goes_on_is_refused() -> None:
    """It is behind in the round in which it ends the run."""
    ahead = Recorded()
    left("none", ahead, then=nothing)
    with pytest.raises(UsageError, match="did not end training"):
        left("epoch", Losing(5, ahead.at_boundary[6]), then=nothing)


def left_by_hand(place: str, session: SoloSession) -> Result:
    """The result of an `ElasticLoop` of six iterations that ends after three of them, at ``place``."""

    def run() -> Result:
        enter_session(session)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loop = ElasticLoop(model, optimizer, data(32), epochs=EPOCHS, batch_size=16, num_shards=2)
        for iteration in loop:
            if place == "start" and iteration.number == 3:
                break
            for inputs, targets in iteration.shards():
                iteration.backward(F.cross_entropy(model(inputs), targets))
            if place == "shards" and iteration.number == 2:
                break
            if not iteration.exchange():
                continue
            optimizer.step()
            if iteration.number == 2 and place == "stop":
                loop.stop()
            if iteration.number == 2 and place == "end":
                break
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        complete_left(session)
        assert loop.result is not None
        return loop.result

    result = alone(run)
    assert isinstance(result, Result)
    return result


def test_leaving_a_loop_by_hand_is_stopping_after_the_newest_iteration() -> None:
    stopped = left_by_hand("stop", SoloSession())
    assert left_by_hand("end", SoloSession()) == left_by_hand("start", SoloSession()) == stopped
    assert stopped.iterations == 3


def test_leaving_a_loop_by_hand_before_the_exchange_is_refused() -> None:
    with pytest.raises(UsageError, match=r"was left in the middle of iteration 2.*after `if iteration.exchange"):
        left_by_hand("shards", SoloSession())


@pytest.mark.parametrize("lost_round", [2, 3])
@pytest.mark.parametrize("place", ["end", "start"])
def test_a_worker_that_was_behind_leaves_a_loop_by_hand_with_the_others(place: str, lost_round: int) -> None:
    """Round 3 is the last iteration."""
    ahead = Recorded()
    undisturbed = left_by_hand(place, ahead)
    assert left_by_hand(place, Losing(lost_round, ahead.at_boundary[lost_round + 1])) == undisturbed


def test_a_loop_by_hand_that_never_began_does_not_count_as_complete() -> None:
    class Broken(SoloSession):
        def join(self, ready: Ready, state: RunState) -> bool:
            raise ValueError

    def run() -> None:
        session = Broken()
        enter_session(session)
        model = network()
        with suppress(ValueError):
            list(ElasticLoop(model, torch.optim.SGD(model.parameters(), lr=1.0), data(32)))
        complete_left(session)

    with pytest.raises(UsageError, match="the training call was left before its end"):
        alone(run)


def test_a_training_call_that_an_error_has_left_does_not_count_as_complete() -> None:
    """Of a library, which calls back: it has not come to its end."""

    class Fails(Callback):
        def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
            raise ValueError

    def run() -> None:
        session = SoloSession()
        enter_session(session)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        elastic = ElasticModel(model, lambda: (data(32), None), F.cross_entropy, optimizer, callbacks=[Fails()])
        with suppress(ValueError):
            elastic.train(batch_size=16)
        complete_left(session)

    with pytest.raises(UsageError, match="the training call was left before its end"):
        alone(run)
