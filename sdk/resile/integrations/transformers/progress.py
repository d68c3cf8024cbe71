"""What a Trainer knows beside model, optimizer and schedule: part of the run's state, so that a joiner knows it too."""

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, ProgressCallback, TrainerCallback

from resile.training.extend import Warned, current_session, extra_states, load_extra_states

from ..callback_state import CallbackState, is_everywhere

if TYPE_CHECKING:
    from .trainer import ElasticTrainer

_OF_THE_WORKER = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "best_model_checkpoint"}
_TIMES = ("_runtime", "_per_second", "_preparation_time")
"""Suffixes of the names of logged values that measure this worker's time."""
_DIGEST = "resile/callbacks"
_COMPARED_ITERATIONS = (1, 10, 100, 1000)
_MAX_NAMES = 5


class TrainerProgress:
    """The state of ``trainer`` and of its callbacks, as plain values and tensors.

    For a callback that is not the library's own, it holds what `CallbackState` holds. What is received before training
    has begun is given to callbacks in `begin`, after their on_train_begin.
    """

    may_differ = True
    """Plain values may differ between workers: callbacks may have attributes of one worker; `compare` warns of them."""

    def __init__(self, trainer: "ElasticTrainer", *, keeps_best: bool) -> None:
        self._trainer = trainer
        self._callbacks = CallbackState(self._find_callbacks)
        self._best = [tensor.clone() for tensor in self._tensors()] if keeps_best else []
        self._best_extra: dict[str, Any] = {}
        self.has_best = False

    @property
    def has_begun(self) -> bool:
        """Whether this worker has begun to train."""
        return self._callbacks.has_begun

    def begin(self) -> None:
        """Training begins here: callbacks take over what was received."""
        self._callbacks.begin()

    def scalars(self, iteration: int) -> dict[str, float]:
        """Return scalars of each shard of ``iteration``, which `compare` reads: in a few iterations, a digest."""
        return {_DIGEST: float(self._callbacks.digest())} if iteration in _COMPARED_ITERATIONS else {}

    def compare(self, means: dict[str, float]) -> None:
        """Warn, on the lowest rank, of callbacks that differ between workers; take the digest out of ``means``.

        That is no fault where no decision follows from it, as with a time, or with what the lowest rank alone notes.
        """
        mean, session = means.pop(_DIGEST, None), current_session()
        if mean is None or session.view.rank or is_everywhere(self._callbacks.digest(), mean):
            return
        names = [
            f"{type(callback).__name__}.{name}"
            for callback, known in zip(self._find_callbacks(), self._callbacks.changed(), strict=True)
            for name in known
        ]
        message = (
            f"attributes of callbacks differ between workers, among {', '.join(names[:_MAX_NAMES])}: a worker that "
            "joins takes over those of another one. Keep what belongs to one worker, such as a time, a path or a "
            "process id, in a variable of the script, or set it in on_train_begin"
        )
        session.report(Warned(worker=session.view.me, message=message))

    def keep_best(self) -> None:
        """Keep the model as it is."""
        self.has_best = True
        self._best_extra = copy.deepcopy(extra_states(self._trainer.model))
        for kept, tensor in zip(self._best, self._tensors(), strict=True):
            kept.copy_(tensor)

    def load_best(self) -> None:
        """Make the model the one that was kept last, if one was."""
        if self.has_best:
            load_extra_states(self._trainer.model, self._best_extra)
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
            "best_extra": self._best_extra,
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
        self._best_extra = state_dict.get("best_extra", {})  # older versions stored none
        self.has_best = state_dict["has_best"]
        self._callbacks.load(state_dict["callbacks"])

    def _find_callbacks(self) -> list[TrainerCallback]:
        return [each for each in self._trainer.callback_handler.callbacks if _belongs_to_state(each)]

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
