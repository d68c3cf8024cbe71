"""Plain attributes of modules and optimizers that change while a script trains: they belong to the state of a run."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

_ABSENT = object()
_OTHER = object()
"""In place of a value that is not plain, so that no tensor is kept alive."""
_PLAIN = frozenset({int, float, bool, type(None)})


class ScriptAttributes:
    """The attributes that change between the shards of one iteration and those of the next.

    There a script changes them, as by ``model.temperature *= 0.9``, and an optimizer in its step. What has ever changed
    while shards were computed stays the worker's own, because a forward pass keeps there what only makes it faster: the
    size of a mask without the mask would mislead another worker. So do attributes whose names begin with an underscore,
    flags of optimizers (which say what was done on this worker), and values that are not numbers, strings, None or
    tuples of these.
    """

    may_differ = True
    """An attribute may be that of one worker, such as a time."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        modules = {f"model.{path}": _Owner(vars(module)) for path, module in model.named_modules()}
        steppers = {f"optimizer.{n}": _Owner(vars(each), has_flags=False) for n, each in enumerate(optimizers)}
        self._owners = modules | steppers
        self._is_open: bool | None = None
        """None before the first iteration: all workers run the script up to there."""

    def begin(self) -> None:
        """The script gets its first iteration: what it did before, all workers do."""
        if self._is_open is None:
            self.open()

    def open(self) -> None:
        """All shards of an iteration, or of a batch of validation, were computed: what changes from now on counts."""
        self._look()
        self._is_open = True

    def close(self) -> None:
        """The first shard of an iteration, or of a batch of validation, is about to be computed."""
        if self._is_open is not False:
            self._look()
            self._is_open = False

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that have changed, by the names of their owners."""
        self._look()
        return {name: owner.changed() for name, owner in self._owners.items() if owner.changed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the attributes that `state_dict` returned on another worker, or in an earlier run."""
        self._look()
        for name, attributes in state_dict.items():
            if name in self._owners:
                self._owners[name].load(attributes)
        self._is_open = True

    def mark(self) -> None:
        """Remember the present values for `changed_since_mark`."""
        self._look()
        for owner in self._owners.values():
            owner.mark()

    def changed_since_mark(self) -> dict[str, Any]:
        """Return what `state_dict` does, with the values at the last mark; without those that were not there."""
        self._look()
        return {name: owner.marked() for name, owner in self._owners.items() if owner.changed()}

    def load_marked(self, state_dict: dict[str, Any]) -> None:
        """Set the values that `changed_since_mark` returned on another worker, which become those of the mark here."""
        for name, attributes in state_dict.items():
            if name in self._owners:
                self._owners[name].load_marked(attributes)

    def _look(self) -> None:
        for owner in self._owners.values():
            owner.look(self._is_open)


class _Owner:
    """The attributes of one module or optimizer."""

    def __init__(self, attributes: dict[str, Any], *, has_flags: bool = True) -> None:
        self._attributes = attributes
        self._kept = _PLAIN if has_flags else _PLAIN - {bool}
        self._names: list[str] = []
        self._size = 0
        self._changed: set[str] = set()
        self._own: set[str] = set()
        self._seen: list[Any] = []
        self._marked: dict[str, Any] = {}

    def look(self, is_script: bool | None) -> None:
        """Find what has changed since the last time: by the script, while shards were computed, or (None) before."""
        now, before = self._read(), self._seen
        self._seen = now
        if is_script is None or (len(now) == len(before) and all(map(is_, now, before))):
            return
        before += [_ABSENT] * (len(now) - len(before))
        for name, old, new in zip(self._names, before, now, strict=True):
            if new is not old and not _is_same(old, new):
                (self._changed if is_script else self._own).add(name)

    def changed(self) -> dict[str, Any]:
        names = sorted(self._changed - self._own)
        values = {name: self._plain_or_other(self._attributes.get(name, _ABSENT)) for name in names}
        return {name: value for name, value in values.items() if value is not _ABSENT and value is not _OTHER}

    def load(self, attributes: dict[str, Any]) -> None:
        shared = {name: value for name, value in attributes.items() if name not in self._own}
        self._attributes.update(shared)
        self._changed.update(shared)
        self._seen = self._read()

    def mark(self) -> None:
        self._marked = dict(zip(self._names, self._seen, strict=True))

    def marked(self) -> dict[str, Any]:
        values = {name: self._marked.get(name, _ABSENT) for name in self.changed()}
        return {name: value for name, value in values.items() if value is not _ABSENT and value is not _OTHER}

    def load_marked(self, attributes: dict[str, Any]) -> None:
        for name in self.changed().keys() - attributes.keys():
            del self._attributes[name]
        self.load(attributes)
        self._marked = attributes

    def _read(self) -> list[Any]:
        if len(self._attributes) != self._size:
            self._size = len(self._attributes)
            known = set(self._names) | {"training"}  # modes have their own place in the state
            self._names += [name for name in self._attributes if name not in known and not name.startswith("_")]
        get, kept = self._attributes.get, self._kept
        return [
            value if type(value := get(name, _ABSENT)) in kept else self._plain_or_other(value) for name in self._names
        ]

    def _plain_or_other(self, value: Any) -> Any:
        is_plain = all(map(self._is_number_or_text, value)) if type(value) is tuple else self._is_number_or_text(value)
        return value if is_plain or value is _ABSENT else _OTHER

    def _is_number_or_text(self, value: Any) -> bool:
        if type(value) is str:
            return value.isascii() or value.encode(errors="ignore").decode() == value
        return type(value) in self._kept or isinstance(value, np.number)


def _is_same(old: object, new: object) -> bool:
    return type(old) is type(new) and old == new
