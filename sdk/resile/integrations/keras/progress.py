"""What a Keras model has beside its own variables: part of the run's state, so that a worker that joins has it too."""

from typing import Any

import keras
import numpy as np
import torch
from keras import callbacks
from keras.src.callbacks.monitor_callback import MonitorCallback

from resile_shared.errors import UsageError

from ..callback_state import Attributes, CallbackState
from .callbacks import OnLowestRank

_SCALARS = (bool, int, float, str, np.generic)


class CompiledVariables:
    """The variables of the optimizer, which may scale the loss as a GradScaler does, and of metrics.

    A model may have further optimizers as attributes. Raises UsageError for one that has no variables yet.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        held = [
            model.optimizer,
            *(each for each in vars(model).values() if isinstance(each, keras.optimizers.Optimizer)),
        ]
        self._optimizers = list({id(each): each for each in held if each is not None}.values())
        for each in self._optimizers:
            if not each.built:
                raise UsageError(
                    f"the optimizer {each.name} of the model is not built, so that its variables are not known: call "
                    "its build() with the variables that it changes, as in "
                    "`self.d_optimizer.build(self.discriminator.trainable_variables)`, before fit()"
                )

    def get_scale(self) -> float:
        """By how much the optimizer scales the loss."""
        optimizer = self._model.optimizer
        return 1.0 if optimizer is None else float(optimizer.scale_loss(1.0))

    def state_dict(self) -> dict[str, Any]:
        """Return their values, in the order of the variables."""
        return {name: [each.value.detach() for each in kept] for name, kept in self._variables().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, kept in self._variables().items():
            for variable, value in zip(kept, state_dict[name], strict=True):
                variable.value.copy_(value)

    def _variables(self) -> dict[str, list[Any]]:
        optimizers = {f"optimizer {number}": each.variables for number, each in enumerate(self._optimizers)}
        return {**optimizers, "metrics": self._model.metrics_variables}


class FitProgress:
    """How far ``fit`` is, and what callbacks and the model have as plain attributes and arrays."""

    may_differ = True
    """Plain values may differ between workers: callbacks may have attributes of one worker, such as a time."""

    def __init__(self, model: keras.Model, held: callbacks.CallbackList) -> None:
        self.epoch = -1
        """The newest epoch that has begun."""
        self.step = 0
        """The number of the next batch in it."""
        self._kept = [each for each in held.callbacks if not isinstance(each, OnLowestRank)]
        self._callbacks = CallbackState(lambda: [model, *self._kept], attributes=_attributes)
        self._received: list[Attributes] = []

    @property
    def has_begun(self) -> bool:
        """Whether this worker has begun to train."""
        return self._callbacks.has_begun

    def begin(self) -> None:
        """Training begins here: callbacks take over what was received."""
        for each in self._kept:
            if isinstance(each, MonitorCallback) and each.monitor_op is None:
                each._set_monitor_op()  # which changes min_delta, and is else done at the end of the first epoch
        self._callbacks.begin()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a joiner needs."""
        changed = self._callbacks.changed() if self.has_begun else self._received
        return {"epoch": self.epoch, "step": self.step, "callbacks": changed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]
        self._received = state_dict["callbacks"]
        self._callbacks.load(self._received)


def _attributes(owner: Any) -> Attributes:
    """The attributes that travel: of a callback plain ones and arrays, of a model numbers and texts of the script."""
    if isinstance(owner, keras.Model):
        return {k: v for k, v in vars(owner).items() if not k.startswith("_") and isinstance(v, _SCALARS)}
    return {name: value for name, value in vars(owner).items() if _travels(value)}


def _travels(value: Any) -> bool:
    if type(value) is dict:
        return all(_travels(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_travels, value))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return value is None or isinstance(value, _SCALARS)
