"""Averages of a model's weights: they are updated by iterations, not batches, and belong to the state of a run."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from resile_shared.errors import UsageError

_SEARCHED_AT = 1
"""The iteration before which copies are searched for: a script has made its average by then."""
_COMPARED_AT = (2, 3)
_NEAR = 0.1
"""A list of tensors counts as a copy only if it is this near: such lists are common, those of gradients among them."""

_IN_STATE = (
    'Pass it to the training call, as in prepare(..., state={"ema": ema}) or ElasticLoop(..., state={"ema": ema})'
)
Copy = list[Tensor] | tuple[Tensor, ...] | dict[str, Tensor]
Marks = tuple[tuple[int, int], ...]


class AverageWatch:
    """Refuses averages that a worker which joins or resumes would start over, and those updated with each batch.

    ``state`` are the script's own parts of the run's state. An `AveragedModel` is recognised at its first update. Any
    other copy of the model, dict of tensors by the names of its parameters, or list of tensors in their order, is
    recognised when it has changed in two iterations. Raises UsageError.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        self._model = model
        self._state = state
        self._copies: list[tuple[str, Copy]] = []
        self._marks: list[Marks] = []
        self._refusal: UsageError | None = None

    @contextmanager
    def watch_updates(self, may_update: Callable[[], bool]) -> Iterator[None]:
        """In this context an `AveragedModel` of the script may be updated only while ``may_update()`` is true."""
        original = AveragedModel.update_parameters

        @wraps(original)
        def update_parameters(average: AveragedModel, model: nn.Module) -> None:
            if any(model is module for module in self._model.modules()):
                is_part_of_model = any(average is module for module in self._model.modules())
                if not (is_part_of_model or _is_part_of(average, self._state)):
                    self._refusal = _not_in_state("the average of weights (AveragedModel)")
                elif not may_update():
                    self._refusal = UsageError(
                        "the average of weights (AveragedModel) was updated for a batch, not for an iteration, so "
                        "that it would depend on the number of workers: write `if loader.sync_gradients:` before "
                        "`update_parameters`, or call it after iteration.exchange()"
                    )
                self._raise_refusal()
            original(average, model)

        AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            AveragedModel.update_parameters = original  # type: ignore[method-assign]

    def begin_iteration(self, number: int) -> None:
        """Iteration ``number`` of this worker begins, from 0. Raises UsageError."""
        self._raise_refusal()  # if the script has caught it
        if number == _SEARCHED_AT:
            self._copies = list(self._find_copies())
            self._marks = [_marks(tensors) for _, tensors in self._copies]
        elif number in _COMPARED_AT and self._copies:
            marks = [_marks(tensors) for _, tensors in self._copies]
            changed = [index for index, mark in enumerate(marks) if mark != self._marks[index]]
            self._copies = [self._copies[index] for index in changed]
            self._marks = [marks[index] for index in changed]
            for name, copy in self._copies if number == _COMPARED_AT[-1] else ():
                if self._is_near(copy):
                    raise _not_in_state(name)
        elif number > _COMPARED_AT[-1]:
            self._copies = []

    def _raise_refusal(self) -> None:
        if self._refusal:
            raise self._refusal

    def _find_copies(self) -> Iterator[tuple[str, Copy]]:
        """Copies of the model that are not part of the state, and do not share its memory."""
        named = dict(self._model.named_parameters())
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        shapes = [parameter.shape for parameter in named.values()]
        own = {id(module) for module in self._model.modules()}
        listed = [shapes, [parameter.shape for parameter in trained.values()]]
        known = {tensor.data_ptr() for tensor in named.values()} | set(_addresses(self._state))
        lengths = {len(named), len(trained)}
        is_module = _ModuleTypes()
        for value in gc.get_objects():
            kind = type(value)
            if kind is dict:
                if len(value) not in lengths:
                    continue  # half a million objects are looked at
                like = next((each for each in (named, trained) if value.keys() == each.keys()), None)
                if like and all(isinstance(v, Tensor) and v.shape == like[name].shape for name, v in value.items()):
                    yield from self._unless_known("a dict of tensors by the names of the parameters", value, known)
            elif kind is list or kind is tuple:
                if len(value) not in lengths or not all(isinstance(each, Tensor) for each in value):
                    continue
                if value and [each.shape for each in value] in listed:
                    yield from self._unless_known("a list of tensors like the parameters", value, known)
            elif is_module[kind] and id(value) not in own:
                tensors = list(value.parameters())
                if [tensor.shape for tensor in tensors] == shapes:
                    yield from self._unless_known(f"a second {kind.__name__} like the model", tensors, known)

    def _unless_known(self, name: str, copy: Copy, known: set[int]) -> Iterator[tuple[str, Copy]]:
        if not known & {tensor.data_ptr() for tensor in _values(copy)}:
            yield name, copy

    @torch.no_grad()
    def _is_near(self, copy: Copy) -> bool:
        """Whether a copy is closer to the parameters than these are to zero: gradients, say, are not."""
        parameters = dict(self._model.named_parameters())
        own = [parameters[name] for name in copy] if isinstance(copy, dict) else list(parameters.values())
        if len(own) != len(copy):
            own = [parameter for parameter in own if parameter.requires_grad]
        pairs = list(zip(_values(copy), own, strict=True))
        distance = sum(float((one.to(other.device) - other).float().square().sum()) for one, other in pairs)
        length = sum(float(other.float().square().sum()) for _, other in pairs)
        return distance < length * (1.0 if isinstance(copy, dict) or isinstance(copy[0], nn.Parameter) else _NEAR)


def _is_part_of(value: Any, state: Mapping[str, Any]) -> bool:
    held = [item for part in state.values() for item in (part, *getattr(part, "__dict__", {}).values())]
    return any(value is item for item in held)


def _addresses(state: Mapping[str, Any]) -> Iterator[int]:
    """Where the tensors of the state's parts are in memory."""
    waiting: list[Any] = [part.state_dict() for part in state.values() if hasattr(part, "state_dict")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value.data_ptr()
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


def _values(copy: Copy) -> list[Tensor]:
    return list(copy.values() if isinstance(copy, dict) else copy)


def _marks(copy: Copy) -> Marks:
    """What changes when a tensor is written to or replaced."""
    return tuple((tensor.data_ptr(), tensor._version) for tensor in _values(copy))


class _ModuleTypes(dict[type, bool]):
    """Whether types are of modules, looked up faster than asked."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, nn.Module)
        return self[kind]


def _not_in_state(what: str) -> UsageError:
    return UsageError(
        f"{what} changes as training goes on and is not part of the run's state, so a worker that joins or "
        f"resumes would start it over: it seems to be a moving average of weights or a target network. {_IN_STATE}"
    )
