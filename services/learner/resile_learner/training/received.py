"""The script's own state as this worker has received it, kept until the script has repeated what others had done.

A script runs its code at the start of an epoch on each worker that begins within that epoch, although the state that
this worker received contains what the code changes. The same holds for the code at the end of an epoch, on a worker
that was behind there, and in a loop by hand for the code before the first shard of an iteration. What was received is
therefore put in place again when that code has run.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..state.optimizer import OptimizerOptions
from ..state.run import BufferValues, Stateful


class ReceivedState:
    """Keeps what the script may change between iterations: attributes, buffers, optimizer options, parts of its state.

    ``has_begun_iteration()`` tells whether the script has begun the next iteration to be committed, and so has run the
    code before it. That belongs to the state of a run: a worker that is lost in an iteration has the others give away
    a state with that code's changes.
    """

    may_differ = True
    """A member may have begun an iteration that another has not."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        parts: Mapping[str, Stateful],
        *,
        has_begun_iteration: Callable[[], bool],
    ) -> None:
        self._parts: list[Stateful] = [BufferValues(model), *map(OptimizerOptions, optimizers), *parts.values()]
        self._has_begun_iteration = has_begun_iteration
        self._has_begun = False
        """Whether the state received last, of which no shard was computed, has what the script does before one."""
        self._is_new = False
        self._values: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return whether the script's code before the next iteration has run."""
        return {"has_begun": self._has_begun or self._has_begun_iteration()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was true of the worker whose state was received."""
        self._has_begun = state_dict["has_begun"]

    def on_load(self) -> None:
        """A whole state was loaded."""
        self._is_new = True

    def open_iteration(self, *, is_in_epoch: bool) -> None:
        """The script gets an iteration. ``is_in_epoch``: one whose epoch the script begins first, in its midst."""
        if self._is_new:
            self._is_new = False
            self._has_begun |= is_in_epoch
            self._values = []
            if self._has_begun:
                self.hold()

    def hold(self) -> None:
        """Keep copies of what is in place now."""
        self._values = self._values or [copy.deepcopy(part.state_dict()) for part in self._parts]

    def end_epoch(self) -> None:
        """The script has run its code at the end of an epoch."""
        self._restore()
        if not self._has_begun:
            self._values = []

    def begin_iteration(self) -> None:
        """The script has run its code before the first shard of an iteration."""
        if self._has_begun:
            self._restore()
        self._values, self._has_begun = [], False

    def _restore(self) -> None:
        for part, values in zip(self._parts, self._values, strict=False):
            part.load_state_dict(copy.deepcopy(values))
