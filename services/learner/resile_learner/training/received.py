"""The script's own state as this worker has received it, kept until the script has repeated what others had done.

A script runs its code at the start of an epoch on each worker that begins within that epoch, although the state that
this worker received contains what the code changes. The same holds for the code at the end of an epoch, on a worker
that was behind there, and in a hand-written loop for the code before the first shard of an iteration. What was received
is therefore restored when that code has run.

The code at the end of an epoch may decide by what it finds, as early stopping does. So the state also contains what the
script of each worker found there, and the code of a worker that was behind begins with that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..state.flat import FlatState, flatten, unflatten
from ..state.memory import StateError
from ..state.optimizer import OptimizerOptions
from ..state.run import BufferValues, Stateful
from .attributes import ScriptAttributes

MOST_BYTES = 1 << 20
"""A larger part, such as an average of weights, is not kept as it was before the code at the end of an epoch."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The integer dtypes by the bytes of an element; larger elements are compared as several integers."""


class ReceivedState:
    """Keeps what the script may change between iterations: attributes, buffers, optimizer options, parts of its state.

    ``iteration()`` is the number of the next iteration to be committed. ``has_begun_iteration()`` tells whether the
    script has begun it, and so has run the code before it. That belongs to the state of a run: when a worker is lost in
    an iteration, the others hand over a state with that code's changes.
    """

    may_differ = True
    """Whether members may differ: one may have begun an iteration that another has not."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        attributes: ScriptAttributes,
        parts: Mapping[str, Stateful],
        *,
        iteration: Callable[[], int],
        has_begun_iteration: Callable[[], bool],
    ) -> None:
        options = {f"options of optimizer {n}": OptimizerOptions(each) for n, each in enumerate(optimizers)}
        given = {f"state {name}": part for name, part in parts.items()}
        self._named: dict[str, Stateful] = {"buffers": BufferValues(model), **options, **given}
        self._parts: list[Stateful] = [*self._named.values(), attributes]
        self._attributes = attributes
        self._iteration = iteration
        self._before_end: dict[str, Any] = {}
        """The values that the code at the end of the newest epoch began with, and the iteration that follows."""
        self._has_begun_iteration = has_begun_iteration
        self._has_begun = False
        """Whether the state received last has what the script does before a shard; false once one is computed."""
        self._is_new = False
        self._values: list[FlatState | None] = []
        """The held values of each part; None for a part that cannot be stored."""

    def state_dict(self) -> dict[str, Any]:
        """Return whether the code before the next iteration has run, and what the code at the end of an epoch found."""
        before_end = self._before_end if self._before_end.get("iteration") == self._iteration() else {}
        if before_end:
            before_end = {**before_end, "attributes": self._attributes.changed_since_mark()}
        return {"has_begun": self._has_begun or self._has_begun_iteration(), "before_end": before_end}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was true of the worker whose state was received."""
        self._has_begun = state_dict["has_begun"]
        self._before_end = state_dict["before_end"]

    def on_load(self) -> None:
        """A whole state was loaded."""
        self._is_new = True

    def open_iteration(self, *, is_in_epoch: bool) -> None:
        """The script gets an iteration. ``is_in_epoch``: the loop has epochs, and this is not the first of one."""
        if self._is_new:
            self._is_new = False
            self._has_begun |= is_in_epoch
            self._values = []
            if self._has_begun:
                self.hold()

    def hold(self) -> None:
        """Keep copies of what is in place now."""
        if not self._values:
            flat = [_flatten(part.state_dict()) for part in self._parts]
            self._values = [each and _clone(each) for each in flat]

    def abandon_iteration(self) -> None:
        """The script repeats the iteration under way, and with it its code before the first shard."""
        self.hold()
        self._has_begun = True

    def begin_epoch_end(self, *, is_behind: bool) -> None:
        """The script runs its code at the end of an epoch. If it ``is_behind``, the others have done so before."""
        if is_behind:
            self.hold()
            self._load_before_end()
        else:
            flat = {name: _flatten(part.state_dict()) for name, part in self._named.items()}
            small = {name: _copy(each) for name, each in flat.items() if each and _num_bytes(each) <= MOST_BYTES}
            self._before_end = {"iteration": self._iteration() + 1, "parts": small}
            self._attributes.mark()

    def _load_before_end(self) -> None:
        before = _copy(flatten(self._before_end))
        for name, values in before.get("parts", {}).items():
            self._named[name].load_state_dict(values)
        self._attributes.load_marked(before.get("attributes", {}))

    def end_epoch(self) -> None:
        """The script of a worker that was behind has run its code at the end of an epoch."""
        self.restore()
        if not self._has_begun:
            self._values = []

    def begin_iteration(self) -> None:
        """The script has run its code before the first shard of an iteration."""
        if self._has_begun:
            self.restore()
        self._values, self._has_begun = [], False

    def restore(self) -> None:
        """Load the parts that the script has changed since `hold`; others may not support being loaded twice."""
        for part, values in zip(self._parts, self._values, strict=False):
            now = values and _flatten(part.state_dict())
            if values and not (now and _is_same(now, values)):
                part.load_state_dict(_copy(values))


def _flatten(values: dict[str, Any]) -> FlatState | None:
    """Flatten the values; None for what cannot be stored."""
    try:
        return flatten(values)
    except StateError:
        return None


def _num_bytes(flat: FlatState) -> int:
    return len(flat.skeleton) + sum(tensor.nbytes for tensor in flat.tensors)


def _clone(flat: FlatState) -> FlatState:
    return FlatState(flat.skeleton, [tensor.clone() for tensor in flat.tensors])


def _copy(flat: FlatState) -> dict[str, Any]:
    """Copy the values as a worker receives them: without gradient history, and with one tensor for shared memory."""
    copied: dict[str, Any] = unflatten(flat.skeleton, _clone(flat).tensors)
    return copied


def _is_same(one: FlatState, other: FlatState) -> bool:
    return one.skeleton == other.skeleton and all(
        mine.device == its.device and torch.equal(_integers(mine), _integers(its))
        for mine, its in zip(one.tensors, other.tensors, strict=True)
    )


def _integers(tensor: Tensor) -> Tensor:
    """View the bits as integers: zero has two representations, and NaN differs from itself."""
    return tensor.reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.int64))
