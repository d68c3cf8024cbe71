"""What a worker observes of its script in its first iterations, and what it leaves to those that began before it."""

import copy

import pytest
import torch
from torch import nn

from resile_learner.training.watch.script_watch import ScriptWatch
from resile_shared.errors import UsageError


def begin_iterations(watch: ScriptWatch, average: nn.Module, *, number: int = 6) -> None:
    """With an average of weights by hand, which is no part of the state."""
    for _ in range(number):
        watch.begin_iteration(is_compared=False)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.mul_(0.99)


def watch_of(model: nn.Module) -> ScriptWatch:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ScriptWatch(model, [optimizer], {}, mode="same-bits", has_fixed_length=True)


def test_a_joiner_does_not_search_for_what_the_members_have_searched_for() -> None:
    """The others wait for it in its first iterations."""
    model = nn.Linear(4, 2)
    average = copy.deepcopy(model)
    with pytest.raises(UsageError, match="is not part of the run's state"):
        begin_iterations(watch_of(model), average)
    joiner = watch_of(model)
    joiner.rely_on_members()
    begin_iterations(joiner, average)
