"""The state of a member, which joiners receive, and members that are behind after a loss."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from resile_learner.state.run import RunState, Stateful
from resile_learner.training.digest import content_digest


class _Values:
    """Implements Stateful over the user's mapping: objects with a state of their own, tensors and plain values."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {name: value.state_dict() if _is_stateful(value) else value for name, value in self._state.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load in place what has a state or is a tensor of the same kind, and replace all else."""
        for name, value in state_dict.items():
            mine = self._state.get(name)
            if mine is not None and _is_stateful(mine):
                mine.load_state_dict(value)
            elif (
                isinstance(mine, Tensor)
                and isinstance(value, Tensor)
                and (mine.dtype, mine.shape) == (value.dtype, value.shape)
            ):
                mine.copy_(value)
            else:
                self._state[name] = value
        for name in self._state.keys() - state_dict.keys():
            del self._state[name]


def _is_stateful(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def run_state(state: MutableMapping[str, Any], facts: Mapping[str, str]) -> RunState:
    """Return ``state`` as a worker's session hands it over and loads it; members of one group have equal ``facts``."""
    values: Stateful = _Values(state)
    whole = RunState(nn.Module(), {}, {"state": values}, after_load=lambda: None)
    whole.facts = dict(facts)
    return whole


def state_digest(state: MutableMapping[str, Any]) -> str:
    """Return a digest of ``state``."""
    return content_digest(_Values(state).state_dict())
