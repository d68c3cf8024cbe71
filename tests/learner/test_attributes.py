"""What a script changes in attributes of its model and optimizer continues where the run does."""

import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resile.training import ElasticLoop, State, Validation
from resile_learner.messages import Message, Warned
from resile_learner.session import SoloSession, enter_session
from resile_learner.state.flat import flatten, unflatten
from resile_learner.state.run import RunState
from resile_learner.training.attributes import ScriptAttributes
from resile_learner.training.run import Run

from .shard_bodies import prepare


class Tempered(nn.Module):
    """A model with a temperature, and a forward pass that keeps something for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.dropout = nn.Dropout(0.0)
        self.temperature = 1.0
        self.longest = 0
        self.cache: torch.Tensor | None = None
        self._private = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.longest += 1
        self.found_in_forward = self.longest
        self.cache = inputs
        return self.layer(self.dropout(inputs)) / self.temperature


class Counting(torch.optim.SGD):
    """An optimizer with a counter that its state_dict does not have, and with a flag."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.num_steps, self.is_prepared = 0, False

    def step(self, closure: Any = None) -> Any:
        self.num_steps, self.is_prepared = self.num_steps + 1, True
        return super().step(closure)


def dataset() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.ones(8, 1))


def loop_of(model: Tempered) -> ElasticLoop:
    return ElasticLoop(model, Counting(model), dataset(), epochs=2, batch_size=4, num_shards=2)


def train(loop: ElasticLoop, model: Tempered, optimizer: Any, change: Callable[[], None]) -> None:
    for iteration in loop:
        for (inputs,) in iteration.shards():
            iteration.backward(model(inputs).mean())
        if iteration.exchange():
            optimizer.step()
            change()


def in_own_context(test: Callable[[], None]) -> Callable[[], None]:
    """A script has one training call."""

    @wraps(test)
    def run() -> None:
        Context().run(test)

    return run


def stored(run: Run) -> dict[str, Any]:
    flat = run.state.flatten()
    attributes: dict[str, Any] = unflatten(flat.skeleton, flat.tensors)["may_differ"]["attributes"]
    return attributes


@in_own_context
def test_a_worker_that_joins_or_resumes_has_what_the_script_and_the_optimizer_have_changed() -> None:
    model = Tempered()
    loop = loop_of(model)

    def change() -> None:
        model.temperature *= 0.5
        model.dropout.p = np.float64(0.25)
        model.added = (1, "a")  # type: ignore[assignment]
        model._private += 1
        model.names = ["not plain"]  # type: ignore[assignment]

    train(loop, model, loop.run.optimizers[0], change)
    changed = {"temperature": 0.0625, "added": (1, "a")}
    assert stored(loop.run) == {
        "model.": changed,
        "model.dropout": {"p": np.float64(0.25)},
        "optimizer.0": {"num_steps": 4},
    }
    joiner = Tempered()
    joining = loop_of(joiner)
    joining.run.state.facts = loop.run.state.facts
    flat = loop.run.state.flatten()
    joining.run.state.load(flat.skeleton, flat.tensors)
    assert {name: getattr(joiner, name) for name in changed} == changed
    assert (joiner.dropout.p, joiner.longest, joiner._private) == (0.25, 0, 0)
    assert (joining.run.optimizers[0].num_steps, joining.run.optimizers[0].is_prepared) == (4, False)  # type: ignore[attr-defined]
    assert stored(joining.run) == stored(loop.run), "it gives them to the next one"


@in_own_context
def test_a_prepared_loop_keeps_what_changes_between_its_epochs() -> None:
    model = Tempered()
    wrapped, optimizer, loader = prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.utils.data.DataLoader(dataset(), batch_size=4),
        num_shards=2,
    )
    for epoch in loader.epochs(3):
        model.temperature = 1 / (1 + epoch)
        for (inputs,) in loader:
            wrapped(inputs).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.epochs_seen = epoch + 1
    assert stored(loader._run) == {"model.": {"epochs_seen": 3, "temperature": 1 / 3}}


@in_own_context
def test_nothing_is_stored_of_a_model_whose_attributes_stay_or_are_set_to_what_they_are() -> None:
    model = Tempered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = ElasticLoop(model, optimizer, dataset(), batch_size=4, num_shards=2)

    def change() -> None:
        model.temperature = float("1.0")
        model.eval()

    train(loop, model, optimizer, change)
    assert stored(loop.run) == {}


@pytest.mark.parametrize("value", ["\ud800", torch.ones(2), (torch.ones(2),), {"a": 1}, object(), ((1,),)])
def test_what_a_state_cannot_hold_or_would_take_time_to_compare_is_left_out(value: Any) -> None:
    model = Tempered()
    attributes = ScriptAttributes(model, [])
    for each in (value, 2.0, value):
        attributes.open()
        model.temperature = each
        attributes.close()
        RunState(model, {"attributes": attributes}, {}, after_load=lambda: None).flatten()
    assert attributes.state_dict() == {}


class Masked(nn.Module):
    """A model that keeps a mask for the length it has seen last, and starts with that of the data it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.length = 0
        self.mask = torch.ones(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.length < inputs.shape[-1]:
            self.length = inputs.shape[-1]
            self.mask = torch.ones(self.length)
        outputs: torch.Tensor = self.layer((inputs * self.mask[: inputs.shape[-1]]).mean(-1, keepdim=True))
        return outputs


@in_own_context
def test_what_a_forward_pass_changes_in_training_is_not_given_away_where_it_changes_in_validation_too() -> None:
    """A worker that joins would have the length of a mask that it lacks."""
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = ElasticLoop(model, optimizer, dataset(), epochs=2, batch_size=4, num_shards=2)
    lengths = iter((8, 16, 32, 64))
    train(loop, model, optimizer, lambda: model(torch.ones(4, next(lengths))))  # type: ignore[arg-type]
    assert (model.length, stored(loop.run)) == (64, {})


@in_own_context
def test_what_a_forward_pass_changes_in_a_validation_by_the_loop_stays_the_workers_own() -> None:
    model = Masked()
    model(torch.ones(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    validation = Validation(
        torch.utils.data.TensorDataset(torch.ones(4, 8)), lambda model, batch: {"score": model(*batch).mean()}
    )
    loop = ElasticLoop(model, optimizer, dataset(), epochs=2, batch_size=4, num_shards=2, validation=validation)
    train(loop, model, optimizer, lambda: setattr(model, "seen", 1))
    assert (model.length, stored(loop.run)) == (8, {"model.": {"seen": 1}})


def test_what_a_worker_has_as_its_own_is_not_set_by_others() -> None:
    model = Masked()
    attributes = ScriptAttributes(model, [])
    attributes.close()
    model(torch.ones(4, 2))
    attributes.load_state_dict({"model.": {"length": 8, "seen": 1}})
    assert (model.length, model.seen) == (2, 1)
    assert attributes.state_dict() == {"model.": {"seen": 1}}


def test_no_tensor_is_kept_alive() -> None:
    model = Tempered()
    attributes = ScriptAttributes(model, [])
    for each in (attributes.close, attributes.open, attributes.close, attributes.open):
        model.cache = torch.ones(1)
        kept = weakref.ref(model.cache)
        each()
        model.cache = None
        assert kept() is None


def test_a_part_of_the_script_may_have_the_name_of_the_attributes() -> None:
    def state_of(model: Tempered, attributes: ScriptAttributes, extra: State) -> RunState:
        return RunState(model, {"attributes": attributes}, {"attributes": extra}, after_load=lambda: None)

    model = Tempered()
    attributes = ScriptAttributes(model, [])
    attributes.open()
    model.temperature = 0.5
    flat = state_of(model, attributes, State(best=7)).flatten()
    tree = unflatten(flat.skeleton, flat.tensors)
    older = flatten({name: part for name, part in tree.items() if name != "may_differ"})
    for each, temperature in ((flat, 0.5), (older, 1.0)):
        joiner, extra = Tempered(), State()
        state_of(joiner, ScriptAttributes(joiner, []), extra).load(each.skeleton, each.tensors)
        assert (joiner.temperature, extra.best) == (temperature, 7)


def test_a_state_that_is_read_before_the_first_shard_does_not_make_later_changes_the_workers_own() -> None:
    model = Tempered()
    attributes = ScriptAttributes(model, [])
    assert attributes.state_dict() == {}
    model.temperature = 0.5
    attributes.close()
    attributes.open()
    model.temperature = 0.25
    assert attributes.state_dict() == {"model.": {"temperature": 0.25}}


class Listening(SoloSession):
    """Keeps the warnings that the worker has reported."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def report(self, message: Message) -> None:
        if isinstance(message, Warned):
            self.warnings.append(message.message)


class Remembering(nn.Module):
    """A model with containers: the script's, those of its forward pass, and such that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1)])
        self.weights = nn.ParameterList([torch.zeros(1)])
        self.history: list[Any] = []
        self.stages = {"warmup": [1, 2]}
        self.frozen = {"a"}
        self.outputs: list[torch.Tensor] = []
        self.options = {"bias": True, "nan": float("nan")}
        self._private: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.outputs.append(inputs)
        outputs: torch.Tensor = self.layers[0](inputs) + self.weights[0]
        return outputs


def remember(model: Remembering, optimizer: Any) -> None:
    model.history.append(len(model.history))
    model.stages["warmup"].append(3)
    model.layers[0].seen = deque(model.history)
    model._private.append(1)
    model.outputs.clear()
    optimizer.rates = {"lr": len(model.history)}


def warned(session: Listening, change: Callable[[Remembering, Any], None], place: str) -> list[str]:
    """The names in the warnings of a loop by ``prepare`` whose script makes a ``change`` at ``place``."""

    def run() -> None:
        enter_session(session)
        model = Remembering()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.rates = {}
        _, _, loader = prepare(model, optimizer, torch.utils.data.DataLoader(dataset(), batch_size=2), num_shards=2)
        for _ in loader.epochs(3):
            if place == "start":
                change(model, optimizer)
            for (inputs,) in loader:
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if place == "iteration" and loader.sync_gradients:
                    change(model, optimizer)
            model.eval()
            model.train()
            if place == "end":
                change(model, optimizer)

    Context().run(run)
    return [text.split()[0] for text in session.warnings]


@pytest.mark.parametrize("place", ["start", "iteration", "end"])
def test_containers_that_a_script_changes_are_named_once_with_a_remedy(place: str) -> None:
    session = Listening()
    names = warned(session, remember, place)
    assert sorted(names) == ["model.history", "model.layers.0.seen", "model.stages", "optimizer.0.rates"]
    assert session.warnings[names.index("model.stages")].startswith("model.stages is a dict that the script changes")
    assert all("resile.training.State" in text for text in session.warnings)


def test_what_is_not_the_scripts_is_not_named() -> None:
    assert warned(Listening(), lambda model, optimizer: model.outputs.clear(), "end") == []


def test_a_worker_that_joins_does_not_repeat_the_warning() -> None:
    model = Remembering()
    initial, joined = ScriptAttributes(model, []), ScriptAttributes(model, [])
    initial.begin()
    joined.load_state_dict({})
    found = []
    for _ in range(2):
        model.history.append(1)
        for each in (initial, joined):
            each.close()
            found.append([text.split()[0] for text in each.warnings()])
            each.open()
    assert found == [["model.history"], [], [], []]


def test_a_value_that_returns_to_an_earlier_one_after_a_state_was_loaded_has_changed() -> None:
    model = nn.Linear(2, 2)
    cold, warm = "cold", "warm"
    model.mode = cold
    attributes = ScriptAttributes(model, [])
    attributes.begin()
    attributes.close()
    attributes.open()
    attributes.load_state_dict({"model.": {"mode": warm}})
    model.mode = cold
    attributes.close()
    model.mode = warm  # while shards are computed
    attributes.open()
    assert attributes.state_dict() == {}
