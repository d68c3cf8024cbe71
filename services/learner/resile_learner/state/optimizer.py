"""The state of an optimizer, restored as it was.

`Optimizer.load_state_dict` casts every tensor to the dtype and device of its parameter: scalars such as NAdam's
``mu_product`` or ASGD's ``eta`` lose bits beside bfloat16 parameters, and a joiner would compute another update.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .facts import StateDiffers


class OptimizerState:
    """The state of an optimizer as plain values and tensors, for `RunState`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and class, and which of its tensors are on the host, unlike their parameters."""
        state = self._optimizer.state_dict()
        on_host = [
            [index, key]
            for index, parameter in self._parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.device.type == "cpu" != parameter.device.type
        ]
        return {"optimizer": state, "on_host": on_host, "class": type(self._optimizer).__name__}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned: dtypes, strides, and whether a tensor is on its parameter's device.

        Groups stay the objects that they are, and so do tensors among their options: a script may hold them.
        """
        if "optimizer" not in state_dict:  # older versions stored that of a body for each batch as PyTorch has it
            state_dict = {"optimizer": state_dict, "on_host": []}
        stored = state_dict["optimizer"]
        self._check_same(state_dict.get("class"), stored["param_groups"])
        held = self._optimizer.param_groups
        groups = list(held)
        self._optimizer.load_state_dict(stored)
        for group, loaded in zip(groups, self._optimizer.param_groups, strict=True):
            _update_group(group, loaded)
        held[:] = groups
        self._optimizer.param_groups = held
        for index, parameter in self._parameters():
            current = self._optimizer.state.get(parameter, {})
            for key, value in stored["state"].get(index, {}).items():
                if key in current:
                    stays = [index, key] in state_dict["on_host"]
                    current[key] = value if stays else _uncast(current[key], value)

    def _check_same(self, stored_class: str | None, stored: Sequence[Mapping[str, Any]]) -> None:
        """Raise StateDiffers if a state belongs to an optimizer of another class (older versions stored none)."""
        name = type(self._optimizer).__name__
        mine = self._optimizer.param_groups
        for value, expected in [(name, stored_class or name), (_sizes(mine), _sizes(stored))]:
            if value != expected:
                raise StateDiffers(
                    f"this worker has another optimizer than the run: {value} instead of {expected}. Build the same "
                    "one with the same parameter groups in every worker, also when a run is resumed"
                )

    def _parameters(self) -> Iterator[tuple[int, Tensor]]:
        """Number the parameters as `Optimizer.state_dict` does."""
        return enumerate(parameter for group in self._optimizer.param_groups for parameter in group["params"])


def _sizes(groups: Sequence[Mapping[str, Any]]) -> str:
    return f"groups of {', '.join(str(len(group['params'])) for group in groups)} parameters"


class OptimizerOptions:
    """Learning rates and all other options of an optimizer's groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the options of each group."""
        groups = self._optimizer.param_groups
        return {"groups": [{name: group[name] for name in group.keys() - {"params"}} for group in groups]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for group, options in zip(self._optimizer.param_groups, state_dict["groups"], strict=True):
            _update_group(group, {**options, "params": group["params"]})


def _update_group(group: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Take over the options of a ``loaded`` group, in the tensors that the script may hold, such as a learning rate."""
    for name in group.keys() - loaded.keys():
        del group[name]
    for name, value in loaded.items():
        own = group.get(name)
        if (
            isinstance(own, Tensor)
            and isinstance(value, Tensor)
            and (own.shape, own.dtype) == (value.shape, value.dtype)
        ):
            own.copy_(value)
        else:
            group[name] = value


def _uncast(loaded: Any, stored: Any) -> Any:
    """Return ``stored`` on the devices of ``loaded``, which PyTorch has cast."""
    if isinstance(stored, Tensor):
        return stored.to(loaded.device)
    if isinstance(stored, Mapping):
        return {key: _uncast(loaded[key], value) for key, value in stored.items()}
    if isinstance(stored, list | tuple):
        return type(stored)(_uncast(*pair) for pair in zip(loaded, stored, strict=True))
    return loaded
