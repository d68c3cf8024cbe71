"""What a Trainer knows beside model, optimizer and schedule: part of the run's state, so that a joiner knows it too."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, ProgressCallback, TrainerCallback

from ..callback_state import CallbackState

if TYPE_CHECKING:
    from .trainer import ElasticTrainer

_OF_THE_WORKER = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "best_model_checkpoint"}
_TIMES = ("_runtime", "_per_second", "_preparation_time")
"""How the names of logged values end that measure this worker's time."""


class TrainerProgress:
    """The state of ``trainer`` and of its callbacks, as plain values and tensors.

    Of a callback that is not the library's own, it has what `CallbackState` has. What is received before training has
    begun is given to callbacks in `begin`, after their on_train_begin.
    """

    def __init__(self, trainer: "ElasticTrainer", *, keeps_best: bool) -> None:
        self._trainer = trainer
        self._callbacks = CallbackState(
            lambda: [each for each in trainer.callback_handler.callbacks if _belongs_to_state(each)]
        )
        self._best = [tensor.clone() for tensor in self._tensors()] if keeps_best else []
        self.has_best = False

    @property
    def has_begun(self) -> bool:
        """Whether this worker has begun to train."""
        return self._callbacks.has_begun

    def begin(self) -> None:
        """Training begins here: callbacks take over what was received."""
        self._callbacks.begin()

    def keep_best(self) -> None:
        """Keep the parameters as they are."""
        self.has_best = True
        for kept, tensor in zip(self._best, self._tensors(), strict=True):
            kept.copy_(tensor)

    def load_best(self) -> None:
        """Make the parameters those that were kept last, if any were."""
        if self.has_best:
            for kept, tensor in zip(self._best, self._tensors(), strict=True):
                tensor.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a joiner has to know."""
        trainer = self._trainer
        state = _without(dataclasses.asdict(trainer.state), _OF_THE_WORKER)
        state["log_history"] = [_without_times(entry) for entry in state["log_history"]]
        return {
            "state": state,
            "loss": (float(trainer._tr_loss), float(trainer._total_loss_scalar), trainer._globalstep_last_logged),
            "flos": trainer.current_flos,
            "callbacks": self._callbacks.changed(),
            "best": self._best,
            "has_best": self.has_best,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        trainer = self._trainer
        for name, value in state_dict["state"].items():
            setattr(trainer.state, name, value)
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = state_dict["loss"]
        trainer._tr_loss = torch.tensor(loss, dtype=torch.float64)
        trainer.current_flos = state_dict["flos"]
        for kept, received in zip(self._best, state_dict["best"], strict=True):
            kept.copy_(received)
        self.has_best = state_dict["has_best"]
        self._callbacks.load(state_dict["callbacks"])

    def _tensors(self) -> list[Tensor]:
        model = self._trainer.model
        return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


class ElasticProgressBar(ProgressCallback):
    """The progress bar of whichever worker has the lowest rank at the moment."""

    training_bar: Any
    current_step: int

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Count from the step that this worker begins with."""
        super().on_train_begin(args, state, control, **more)
        self._update(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Advance, or begin: another worker may have shown the bar before."""
        if state.is_world_process_zero and self.training_bar is None:
            super().on_train_begin(args, state, control, **more)
        self._update(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Close the bar, if it is this worker's."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _update(self, state: Any) -> None:
        if self.training_bar is not None and state.is_world_process_zero:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step


def _belongs_to_state(callback: TrainerCallback) -> bool:
    is_own = type(callback).__module__.split(".")[0] in ("transformers", "resile")
    return isinstance(callback, ExportableState) or not is_own


def _without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
