"""Refuses what a script does with its optimizer that the other workers could not know or would not do alike."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resile_shared.errors import UsageError

from ...state.modules import ModuleTree
from ...state.optimizer import OptimizerState
from ...state.run import Stateful

WITHOUT_SHARDS = 'use prepare() without body="shard", whose loop body runs once for each batch (docs/division.md)'


class SteppedWithinBackward(UsageError):
    """An optimizer was stepped before the gradients of its parameters were exchanged."""

    def __init__(self) -> None:
        super().__init__(
            "an optimizer was stepped within backward(), as by a hook of a parameter, where the gradient is that of "
            f"one shard: step it after backward(), or {WITHOUT_SHARDS}"
        )


class OptimizerWatch:
    """Refuses what would break equal bits, and counts the steps of an optimizer.

    The count is part of the run's state and of each round's digest, so that a step that one worker alone makes or skips
    is noticed at once. ``state`` are the script's own parts of the state. Raises UsageError.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        self.steps = 0
        self._optimizer = optimizer
        self._modules = ModuleTree(model)
        self._parameters = self._modules.parameters()
        self._requires_grad = [parameter.requires_grad for parameter in self._parameters]
        self._trained = self._ids()
        if not set(self._trained) <= {id(parameter) for parameter in self._parameters}:
            raise UsageError(
                "the optimizer trains parameters that are not the model's, whose gradients no worker would exchange: "
                "make them part of the model"
            )
        if any("initial_lr" in group for group in optimizer.param_groups) and not _has_schedule(state):
            raise UsageError(
                "the learning-rate schedule is not part of the run's state, so that a worker that joins or resumes "
                "would begin it anew: pass it to the training call, as in prepare(model, optimizer, loader, scheduler) "
                'or ElasticLoop(..., state={"schedule": schedule})'
            )
        self._has_begun = False
        """Whether a step has begun since one ended: a step may call that of its base class, and counts once."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def check(self) -> None:
        """Raises UsageError when other parameters are trained than before the training call."""
        now = self._modules.parameters()
        if len(now) != len(self._parameters) or any(map(is_not, now, self._parameters)):
            raise UsageError(
                "the model got other parameters after the training call began, which no worker would exchange and a "
                "joining worker would not have: build the whole model before"
            )
        if [parameter.requires_grad for parameter in self._parameters] != self._requires_grad:
            raise UsageError(
                "parameters were frozen or unfrozen after the training call began: a joining worker could not know; "
                "decide it before, or use parameter groups with a learning rate of 0"
            )
        if self._ids() != self._trained:
            raise UsageError(
                "the optimizer got other parameters after the training call began, whose gradients no worker would "
                "exchange: give it all of them before, with a learning rate of 0 while they should not be trained"
            )

    def check_steps(self, *, before: int, is_lost: bool, may_skip: bool) -> None:
        """After an iteration that began with ``before`` steps: it makes one, unless a member was lost meanwhile."""
        steps = self.steps - before
        if is_lost and steps:
            raise UsageError(
                "optimizer.step() was called although iteration.exchange() returned False, which means that a member "
                "was lost and the iteration is repeated: write `if iteration.exchange(): optimizer.step()`"
            )
        if steps > 1:
            raise UsageError(
                f"optimizer.step() was called {steps} times in one iteration, with the same gradients: call it once "
                "after the exchange"
            )
        if not (is_lost or steps or may_skip):
            raise UsageError(
                "an iteration ended without optimizer.step(), and its gradients are lost: call it after every exchange "
                "(in a prepared loop for every batch: it acts once an iteration). To accumulate gradients, use more "
                "shards (accumulate=... of prepare)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the number of steps of the run."""
        self.steps = state_dict["steps"]

    def _ids(self) -> list[int]:
        return [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]

    def _before_step(self, *arguments: object) -> None:
        self._has_begun = True

    def _after_step(self, *arguments: object) -> None:
        self.steps += self._has_begun
        self._has_begun = False


def is_within_backward() -> bool:
    """Whether this is called by a hook of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raises UsageError for what is no optimizer of PyTorch, such as a wrapper of one, or an optimizer of Keras."""
    for each in optimizers:
        missing = [
            name for name in ("param_groups", "step", "state_dict", "load_state_dict") if not hasattr(each, name)
        ]
        if not missing:
            continue
        name = type(each).__name__
        if type(each).__module__.partition(".")[0] == "keras":
            raise UsageError(
                f"the training call was given Keras' {name} as optimizer: use an optimizer of torch.optim, or "
                'resile.integrations.keras.elastic(model) and model.fit() (docs/integrations.md, "Keras")'
            )
        inner = [
            key for key, value in getattr(each, "__dict__", {}).items() if isinstance(value, torch.optim.Optimizer)
        ]
        wrapped = f"optimizer.{inner[0]}" if inner else "the optimizer that it wraps"
        raise UsageError(
            f"the training call was given a {name} as optimizer, which has no {missing[0]}: pass {wrapped} instead, "
            f"and go on to use the {name}"
        )


@contextmanager
def watch_other_optimizers(model: nn.Module, known: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """In this context no optimizer but the ``known`` ones may step parameters of ``model`` that these do not train.

    An optimizer that these contain, and that steps for them, trains the same parameters. None may step within a
    backward pass. Raises UsageError.
    """
    trained = {id(parameter) for parameter in model.parameters()}
    own = trained - _trained_by(known)

    def check(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        if is_within_backward() and trained & _trained_by([optimizer]):
            raise SteppedWithinBackward
        if own and not any(optimizer is each for each in known) and own & _trained_by([optimizer]):
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that the training call was not given stepped parameters of "
                "the model, for each batch and with a state that no joining worker would have: give the training call "
                "one optimizer with several parameter groups or, where each has a loss of its own, all of them, as in "
                "prepare(model, [first, second], loader)"
            )

    hook = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _trained_by(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    return {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}


def optimizer_parts(
    optimizers: Sequence[torch.optim.Optimizer], watches: Sequence[OptimizerWatch]
) -> dict[str, Stateful]:
    """Return the parts of a run's state that belong to its optimizers, by name; from the second on with a number."""
    parts: dict[str, Stateful] = {}
    for number, (optimizer, watch) in enumerate(zip(optimizers, watches, strict=True)):
        suffix = f" {number}" if number else ""
        parts |= {f"optimizer{suffix}": OptimizerState(optimizer), f"steps{suffix}": watch}
    return parts


def _has_schedule(state: Mapping[str, Any]) -> bool:
    """Whether a part of ``state`` is a schedule, or an object of the script's that holds one."""
    held = [value for part in state.values() for value in (part, *getattr(part, "__dict__", {}).values())]
    return any(isinstance(value, LRScheduler) for value in held)
