"""The modules of a model are found as `named_modules` finds them, however the model changes."""

from collections.abc import Callable

import pytest
from torch import nn

from resile_learner.state.modules import ModuleTree


def model() -> nn.Sequential:
    shared = nn.Linear(2, 2)
    return nn.Sequential(shared, nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2)), shared)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "nothing": lambda model: None,
    "added": lambda model: model.append(nn.Linear(2, 1)),
    "added below": lambda model: model[1].append(nn.Linear(2, 2)),
    "removed": lambda model: model.pop(1),
    "replaced": lambda model: model.__setitem__(1, nn.Identity()),
    "set to None": lambda model: model[1].register_module("1", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_modules_are_those_of_the_model(change: str) -> None:
    changed = model()
    tree = ModuleTree(changed)
    assert list(tree.named()) == list(changed.named_modules())
    CHANGES[change](changed)
    assert list(tree.named()) == list(changed.named_modules())
    assert set(tree.parameters()) == set(changed.parameters())


def test_a_model_that_does_not_change_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ModuleTree(model())
    monkeypatch.delattr(nn.Module, "named_modules")
    assert len(tree.named()) == 5
