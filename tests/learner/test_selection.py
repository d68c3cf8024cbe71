"""Scores keep the best model, end training early and lower learning rates; epochs are counted alike everywhere."""

import math
from collections.abc import Mapping
from contextvars import Context
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from resile.training import Callback, ElasticLoop, ElasticModel, Iteration, Result, Selection, Validation, seed
from resile_learner.state.flat import flatten, unflatten
from resile_learner.state.run import TrainingProgress
from resile_learner.training.selection import Selector
from resile_shared.errors import UsageError

from .shard_bodies import prepare

DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2)


class Epochs(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        self.seen.append((iteration.epoch, loop.epoch))

    def on_epoch(self, loop: ElasticLoop, epoch: int) -> None:
        self.seen.append((epoch, loop.epoch))

    def on_validation(self, loop: ElasticLoop, epoch: int, scores: Mapping[str, float]) -> None:
        self.seen.append((epoch, loop.epoch))

    def on_end(self, loop: ElasticLoop, result: Result) -> None:
        self.seen.append((1, loop.epoch))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    schedule: Any = None, *, validation: Any = DATA, interval: Any = "iteration", callbacks: Any = (), **options: Any
) -> tuple[Result, torch.optim.Optimizer]:
    def run() -> tuple[Result, torch.optim.Optimizer]:
        model, optimizer = make()
        elastic = ElasticModel(
            model,
            lambda: (DATA, validation),
            nn.functional.cross_entropy,
            optimizer,
            schedule(optimizer) if schedule else None,
            {"zero": lambda outputs, targets: 0 * outputs.sum()},
            callbacks,
            lr_scheduler_interval=interval,
        )
        return elastic.train(batch_size=8, **options), optimizer

    return Context().run(run)


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def test_a_score_that_never_gets_better_ends_training_with_the_first_model() -> None:
    result, _ = train(epochs=9, selection=Selection("zero", "max", patience=2))
    assert result.iterations == 3 * 4
    assert result.best is not None
    assert (result.best.epoch, result.best.iteration) == (0, 4)
    assert result.validation == result.best.scores
    assert result.params_sha256 == train(epochs=1)[0].params_sha256


def test_without_keep_best_the_last_model_stays() -> None:
    result, _ = train(epochs=3, selection=Selection("zero", keep_best=False))
    assert result.best is not None
    assert result.best.epoch == 0
    last = train(epochs=3)[0]
    assert (result.params_sha256, result.validation) == (last.params_sha256, last.validation)


def test_a_schedule_steps_once_an_epoch_or_once_an_iteration() -> None:
    rates = [
        learning_rate(train(lambda optimizer: StepLR(optimizer, 1, 0.5), epochs=2, interval=interval)[1])
        for interval in ("epoch", "iteration")
    ]
    assert rates == [0.1 / 2**2, 0.1 / 2**8]


def test_a_plateau_follows_the_score_of_the_selection() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    assert learning_rate(train(schedule, epochs=3, selection=Selection("zero"))[1]) == 0.1 / 2**2
    assert learning_rate(train(schedule, epochs=3)[1]) == 0.1, "the loss gets better"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": Selection("accuracy")}, "no score"),
        ({"selection": Selection(), "validation": None}, "no validation dataset"),
        ({"schedule": ReduceLROnPlateau, "validation": None}, "no validation dataset"),
        ({"schedule": lambda optimizer: ReduceLROnPlateau(optimizer, "max")}, 'mode="min"'),
        ({"schedule": ReduceLROnPlateau, "selection": Selection("zero", "max")}, 'goal="min"'),
        ({"interval": "step"}, "lr_scheduler_interval"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(**options)


@pytest.mark.parametrize("options", [{"goal": "more"}, {"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}])
def test_a_selection_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Selection(**options)


def test_a_score_that_the_validation_lacks_is_refused_in_a_loop_by_hand() -> None:
    def score(model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}

    def run() -> None:
        model, optimizer = make()
        validation = Validation(DATA, score, selection=Selection("accuracy"))
        for iteration in ElasticLoop(model, optimizer, DATA, batch_size=8, validation=validation):
            for inputs, targets in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                optimizer.step()

    with pytest.raises(UsageError, match='no score "accuracy"'):
        Context().run(run)


Scores = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]), min_size=1, max_size=12)


@given(Scores, st.sampled_from(["min", "max"]), st.integers(1, 4), st.data())
def test_a_selection_that_moves_from_worker_to_worker_decides_as_on_one(
    scores: list[float], goal: Any, patience: int, data: st.DataObject
) -> None:
    selection = Selection("score", goal, patience=patience)
    model = nn.Linear(1, 1, bias=False)
    loads: list[float] = []
    selector = Selector(selection, (), model, after_load=lambda: loads.append(model.weight.item()))
    progress = TrainingProgress(iterations_total=len(scores))
    for number, score in enumerate(scores):
        progress.iteration, progress.epoch = number + 1, number + 1
        with torch.no_grad():
            model.weight.fill_(number)
        selector.on_scores({"score": score}, progress)
        if progress.iteration == progress.iterations_total:
            break
        if data.draw(st.booleans()):
            state = flatten(selector.state_dict())
            selector = Selector(selection, (), model, after_load=lambda: loads.append(model.weight.item()))
            selector.load_state_dict(unflatten(state.skeleton, [tensor.clone() for tensor in state.tensors]))
    seen = [score for score in scores[: progress.iteration] if not math.isnan(score)]
    if not seen:
        assert selector.best is None
        return
    best = scores.index(min(seen) if goal == "min" else max(seen))
    assert selector.best is not None
    assert (selector.best.epoch, selector.best.iteration) == (best, best + 1)
    assert loads == [best], "buffers are committed once the best model is loaded"
    assert model.weight.item() == best
    assert progress.iteration in (len(scores), best + 1 + patience)


def test_plateaus_of_a_joiner_have_seen_what_those_of_the_others_have() -> None:
    def worker() -> tuple[torch.optim.Optimizer, Selector]:
        model, optimizer = make()
        return optimizer, Selector(None, [ReduceLROnPlateau(optimizer, patience=1)], model, after_load=lambda: None)

    (ours, member), (theirs, joiner) = worker(), worker()
    progress = TrainingProgress(iteration=1, iterations_total=9, epoch=1)
    for _ in range(2):
        member.on_scores({"loss": 1.0}, progress)
    state = flatten(member.state_dict())
    joiner.load_state_dict(unflatten(state.skeleton, state.tensors))
    for selector in (member, joiner):
        selector.on_scores({"loss": 1.0}, progress)
    assert learning_rate(ours) == learning_rate(theirs) < 0.1


def test_the_best_model_may_have_a_buffer_whose_elements_share_memory() -> None:
    class Shared(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("ones", torch.ones(1).expand(4))

    model = Shared()
    selector = Selector(Selection("loss"), (), model, after_load=lambda: None)
    for iteration, loss in ((1, 1.0), (2, 2.0)):
        with torch.no_grad():
            model.weight.fill_(loss)
        selector.on_scores({"loss": loss}, TrainingProgress(iteration=iteration, iterations_total=2, epoch=iteration))
    assert torch.equal(model.weight, torch.ones(2, 4))


def test_the_best_model_has_the_extra_state_of_its_modules_on_all_workers() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def get_extra_state(self) -> dict[str, float]:
            return {"scale": self.scale}

        def set_extra_state(self, state: dict[str, float]) -> None:
            self.scale = state["scale"]

    models = Scaled(4, 2), Scaled(4, 2)
    member, joiner = (Selector(Selection("loss"), (), model, after_load=lambda: None) for model in models)
    member.on_scores({"loss": 1.0}, TrainingProgress(iteration=1, iterations_total=2, epoch=1))
    for model in models:
        model.scale = 2.0
    state = flatten(member.state_dict())
    joiner.load_state_dict(unflatten(state.skeleton, state.tensors))
    for selector in (member, joiner):
        selector.on_scores({"loss": 2.0}, TrainingProgress(iteration=2, iterations_total=2, epoch=2))
    assert [model.scale for model in models] == [1.0, 1.0]


def test_the_best_model_may_have_had_a_shorter_cache() -> None:
    class Cached(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("cache", torch.zeros(2), persistent=False)
            self.register_buffer("mask", None, persistent=False)

    model = Cached()
    selector = Selector(Selection("loss"), (), model, after_load=lambda: None)
    selector.on_scores({"loss": 1.0}, TrainingProgress(iteration=1, iterations_total=2, epoch=1))
    model.cache, model.mask = torch.zeros(4), torch.ones(4)
    selector.on_scores({"loss": 2.0}, TrainingProgress(iteration=2, iterations_total=2, epoch=2))
    assert model.cache.tolist() == [0.0, 0.0]
    assert model.mask is None


def test_random_numbers_after_a_validation_do_not_depend_on_the_shards_that_a_worker_scores() -> None:
    """Neither in the loop's body nor where the scores arrive."""

    def run(num_shards: int) -> list[float]:
        drawn: list[float] = []
        model, optimizer = make()
        validation = Validation(
            DATA,
            lambda model, batch: {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])},
            on_scores=lambda scores: drawn.append(torch.rand(1).item()),
        )
        options = {"epochs": 2, "batch_size": 16, "num_shards": num_shards, "validation": validation}
        for iteration in ElasticLoop(model, optimizer, DATA, **options):
            drawn.append(torch.rand(1).item())
            for x, y in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(x), y))
            if iteration.exchange():
                optimizer.step()
        return drawn

    drawn = [Context().run(run, num_shards) for num_shards in (1, 4)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 2 * 2 + 1, "of the scores and of the iteration that follows they are the same"


def test_the_epoch_of_the_loop_is_the_same_in_all_callbacks_and_in_all_kinds_of_loops() -> None:
    callback = Epochs()
    train(epochs=2, callbacks=[callback])
    assert len(callback.seen) == 2 * (4 + 2) + 1
    assert all(epoch == counted for epoch, counted in callback.seen)

    def prepared() -> list[tuple[int, int]]:
        seen = []
        model, optimizer, loader = prepare(*make(), DataLoader(DATA, 8))
        for epoch in loader.epochs(2):
            for inputs, targets in loader:
                seen.append((epoch, loader.epoch))
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
            seen.append((epoch, loader.epoch))
        return [*seen, (1, loader.epoch)]

    assert all(epoch == counted for epoch, counted in Context().run(prepared))

    def by_hand() -> None:
        model, optimizer = make()
        loop = ElasticLoop(model, optimizer, DATA, epochs=2, batch_size=8)
        for iteration in loop:
            assert loop.epoch == iteration.epoch
            for inputs, targets in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                optimizer.step()
            assert loop.epoch == iteration.epoch
        assert loop.epoch == 1

    Context().run(by_hand)
