"""Plain attributes of modules and optimizers that change while a script trains: they belong to the state of a run."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

_ABSENT = object()
_PLAIN = (int, float, bool, str, type(None))


class ScriptAttributes:
    """The attributes that change between the shards of one iteration and those of the next.

    There a script changes them, as by ``model.temperature *= 0.9``, and an optimizer in its step. What changes while
    shards are computed stays the worker's own, because a forward pass keeps there what only makes it faster. So do
    attributes whose names begin with an underscore, flags of optimizers (which say what was done on this worker), and
    values that are not numbers, strings, None or tuples of these.
    """

    may_differ = True
    """An attribute may be that of one worker, such as a time."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        modules = {f"model.{path}": _Owner(vars(module)) for path, module in model.named_modules()}
        steppers = {f"optimizer.{n}": _Owner(vars(each), has_flags=False) for n, each in enumerate(optimizers)}
        self._owners = modules | steppers
        self._is_open = False

    def open(self) -> None:
        """All shards of an iteration were computed: what changes from now on counts."""
        for owner in self._owners.values():
            owner.note()
        self._is_open = True

    def close(self) -> None:
        """The first shard of an iteration is about to be computed."""
        if self._is_open:
            self._is_open = False
            for owner in self._owners.values():
                owner.find_changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that have changed, by the names of their owners."""
        if self._is_open:
            self.close()
            self.open()
        return {name: owner.changed() for name, owner in self._owners.items() if owner.changed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the attributes that `state_dict` returned on another worker, or in an earlier run."""
        for name, attributes in state_dict.items():
            if name in self._owners:
                self._owners[name].load(attributes)
        self.open()


class _Owner:
    """The attributes of one module or optimizer."""

    def __init__(self, attributes: dict[str, Any], *, has_flags: bool = True) -> None:
        self._attributes = attributes
        self._has_flags = has_flags
        self._names: list[str] = []
        self._size = 0
        self._changed: set[str] = set()
        self._noted: list[Any] = []

    def note(self) -> None:
        self._noted = self._read()

    def find_changed(self) -> None:
        now, before = self._read(), self._noted
        if len(now) == len(before) and all(map(is_, now, before)):
            return
        before += [_ABSENT] * (len(now) - len(before))
        for name, old, new in zip(self._names, before, now, strict=True):
            if new is not old and self._is_plain(new) and not (self._is_plain(old) and _is_same(old, new)):
                self._changed.add(name)

    def changed(self) -> dict[str, Any]:
        values = {name: self._attributes.get(name, _ABSENT) for name in sorted(self._changed)}
        return {name: value for name, value in values.items() if self._is_plain(value)}

    def load(self, attributes: dict[str, Any]) -> None:
        self._attributes.update(attributes)
        self._changed.update(attributes)

    def _read(self) -> list[Any]:
        if len(self._attributes) != self._size:
            self._size = len(self._attributes)
            known = set(self._names) | {"training"}  # modes have their own place in the state
            self._names += [name for name in self._attributes if name not in known and not name.startswith("_")]
        get = self._attributes.get
        return [get(name, _ABSENT) for name in self._names]

    def _is_plain(self, value: Any) -> bool:
        if type(value) is tuple:
            return all(map(self._is_plain, value))
        if type(value) is bool:
            return self._has_flags
        if type(value) is str:
            return value.isascii() or value.encode(errors="ignore").decode() == value
        return type(value) in _PLAIN or isinstance(value, np.number)


def _is_same(old: object, new: object) -> bool:
    return type(old) is type(new) and old == new
