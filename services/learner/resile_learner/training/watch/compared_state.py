"""What the script may change between exchanges, but only in the same way on all workers, which compare it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...state.facts import PART
from ...state.run import extra_states, may_differ
from ..buffers import Buffers
from ..digest import bits_of, state_digest
from ..settings import Mode


class ComparedState:
    """The options of ``optimizers``, and the parts of the script's ``state``."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any], *, mode: Mode
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._state = state
        self._mode = mode
        self._parts = {name: part for name, part in state.items() if _is_compared(part)}

    def facts(self, buffers: Buffers, iteration: int, *, with_parts: bool) -> dict[str, str]:
        """Facts of ``iteration``, before which ``buffers`` were committed; ``with_parts``, which may be large."""
        return {
            "optimizer_options": f"{crc32(repr(self.options()).encode()):x}",
            "schedules": f"{crc32(repr(self._schedules()).encode()):x}",
            "buffers": f"{buffers.digest(iteration):x}",
            **(self.parts() if with_parts else {}),
        }

    def parts(self) -> dict[str, str]:
        """Digests of the parts of the state, which must be equal on all workers; none in fast mode."""
        if self._mode == "fast":
            return {}
        parts = {f"{PART}{name}": part.state_dict() for name, part in self._parts.items()}
        extra = extra_states(self._model)
        parts |= {"extra_state": extra} if extra else {}
        return {name: state_digest(state) for name, state in parts.items()}

    def options(self) -> list[dict[str, Any]]:
        """Learning rates and all other options of the optimizers' groups, as plain values."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [
            {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in groups
        ]

    def _schedules(self) -> list[object]:
        """The states of the learning-rate schedules, as plain values."""
        states = [list(summed(part.state_dict())) for part in self._state.values() if isinstance(part, LRScheduler)]
        return [float(value) if isinstance(value, float) else value for state in states for value in state]


def summed(value: Any) -> Iterator[object]:
    """Yield plain values as they are, and the sum of each tensor's memory, which is cheap on any device."""
    if isinstance(value, Tensor):
        yield int(bits_of(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from summed(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from summed(item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield value


def _is_compared(part: Any) -> bool:
    """Whether ``part`` of the state is compared as a whole: not schedules, whose steps are compared each iteration."""
    return not (isinstance(part, LRScheduler) or may_differ(part))
