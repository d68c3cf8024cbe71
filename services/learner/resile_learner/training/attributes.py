"""Plain attributes of modules and optimizers that change while a script trains: they belong to the state of a run."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

_ABSENT = object()
_OTHER = object()
"""Stands for a value that is not plain, so that no tensor is kept alive."""
_PLAIN: frozenset[type] = frozenset({int, float, bool, type(None)})
_CONTAINERS = (list, dict, set, deque)
_COMPARED_ITEMS = 64
"""At most this many items of a container are compared."""
_OF_MODULES = frozenset({"training"})
"""Attributes of modules that have a place of their own in the state."""
_OF_OPTIMIZERS = frozenset({"defaults", "state", "param_groups"})
"""Attributes of optimizers that have a place of their own in the state."""


class ScriptAttributes:
    """The attributes that change between the shards of one iteration and those of the next.

    A script changes them there, as in ``model.temperature *= 0.9``, and so does the step of an optimizer. What has ever
    changed while shards were computed stays local to the worker, because a forward pass keeps caches there: the size of
    a mask without the mask would mislead another worker. Also local are attributes whose names begin with an
    underscore, flags of optimizers (which say what was done on this worker), and values that are not numbers, strings,
    None or tuples of these. `warnings` names the lists, dicts and sets among these values that the script changes.
    """

    may_differ = True
    """Whether workers may have different values: an attribute may belong to one worker, such as a time."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        modules = {f"model.{path}": _Owner(vars(module)) for path, module in model.named_modules()}
        steppers = {f"optimizer.{n}": _Owner(vars(each), is_optimizer=True) for n, each in enumerate(optimizers)}
        self._owners = modules | steppers
        self._glance = _Glance(list(self._owners.values()))
        self._is_open: bool | None = None
        """Whether changes count as the script's; None before the first iteration, which all workers begin alike."""
        self._may_warn = False
        """Whether something has changed since the last call of `warnings`."""
        self._is_initial = True
        """Whether this worker has begun with the script's own attributes, so that it may warn about them."""

    def begin(self) -> None:
        """The script gets its first iteration: all workers do what it did before."""
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

    def warnings(self) -> list[str]:
        """Return a line for each container that is now known to change in the script; each once in a run."""
        if not self._may_warn:
            return []
        self._may_warn = False
        found = [
            f"{owner.rstrip('.')}.{name} is a {kind} that the script changes between iterations: a worker that joins "
            "and a run that resumes begin with it as the script has made it. Keep it in a resile.training.State that "
            "is a part of state, or begin its name with an underscore if it may differ"
            for owner, attributes in self._owners.items()
            for name, kind in attributes.new_containers()
        ]
        return found if self._is_initial else []

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that have changed, by the names of their owners."""
        self._look()
        return {name: owner.changed() for name, owner in self._owners.items() if owner.changed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the attributes that `state_dict` returned on another worker, or in an earlier run."""
        self._is_initial = self._is_initial and self._is_open is not None
        self._look()
        for name, attributes in state_dict.items():
            if name in self._owners:
                self._owners[name].load(attributes)
        self._glance.forget()
        self._is_open = True

    def mark(self) -> None:
        """Remember the present values for `changed_since_mark`."""
        self._look()
        for owner in self._owners.values():
            owner.mark()

    def changed_since_mark(self) -> dict[str, Any]:
        """Return what `state_dict` does, with the values at the last mark, and the names that did not exist then."""
        self._look()
        return {name: owner.marked() for name, owner in self._owners.items() if owner.changed()}

    def load_marked(self, state_dict: dict[str, Any]) -> None:
        """Set the values that `changed_since_mark` returned on another worker, which become those of the mark here."""
        for name, attributes in state_dict.items():
            if name in self._owners:
                self._owners[name].load_marked(attributes)
        self._glance.forget()

    def _look(self) -> None:
        if not self._glance.may_have_changed():
            return
        for owner in self._owners.values():
            if owner.look(self._is_open):
                self._may_warn = True
        self._glance.remember()


class _Glance:
    """Detects quickly, for all owners at once, that nothing has changed, which is the usual case."""

    def __init__(self, owners: Sequence["_Owner"]) -> None:
        self._owners = owners
        self._sizes: list[int] | None = None
        self._places: list[tuple[Callable[..., Any], str, frozenset[type], Callable[[Any], Any]]] = []
        self._seen: list[Any] = []

    def may_have_changed(self) -> bool:
        """Whether an attribute may have been added, removed or changed since `remember`."""
        if self._sizes is None or self._sizes != [len(owner.attributes) for owner in self._owners]:
            return True
        now = [
            value if type(value := get(name, _ABSENT)) in kept else plain_or_other(value)
            for get, name, kept, plain_or_other in self._places
        ]
        return not all(map(is_, now, self._seen))

    def remember(self) -> None:
        """All owners have looked."""
        self._sizes = [len(owner.attributes) for owner in self._owners]
        self._places = [
            (owner.attributes.get, name, owner.kept, owner.plain_or_other)
            for owner in self._owners
            for name in owner.names
        ]
        self._seen = [value for owner in self._owners for value in owner.seen]

    def forget(self) -> None:
        """Attributes were loaded: all owners have to look next time."""
        self._sizes = None


class _Owner:
    """The attributes of one module or optimizer."""

    def __init__(self, attributes: dict[str, Any], *, is_optimizer: bool = False) -> None:
        self.attributes = attributes
        self.kept = _PLAIN - {bool} if is_optimizer else _PLAIN
        self._ignored = _OF_OPTIMIZERS if is_optimizer else _OF_MODULES
        self.names: list[str] = []
        self._size = 0
        self._changed: set[str] = set()
        self._own: set[str] = set()
        self.seen: list[Any] = []
        self._marked: dict[str, Any] = {}
        self._named: set[str] = set()
        """The containers that `new_containers` has returned."""

    def look(self, is_script: bool | None) -> bool:
        """Find what has changed since the last time: by the script, while shards were computed, or (None) before.

        Return whether something may have.
        """
        now, before = self._read(), self.seen
        self.seen = now
        if is_script is None or (len(now) == len(before) and all(map(is_, now, before))):
            return False
        before += [_ABSENT] * (len(now) - len(before))
        for name, old, new in zip(self.names, before, now, strict=True):
            if new is not old and not _is_same(old, new):
                (self._changed if is_script else self._own).add(name)
        return True

    def changed(self) -> dict[str, Any]:
        names = sorted(self._changed - self._own)
        values = {name: self.plain_or_other(self.attributes.get(name, _ABSENT)) for name in names}
        return {name: value for name, value in values.items() if _is_stored(value)}

    def new_containers(self) -> list[tuple[str, str]]:
        """The names and kinds of the containers that the script has changed and that were not returned before."""
        seen = dict(zip(self.names, self.seen, strict=True))
        names = [name for name in sorted(self._changed - self._own) if isinstance(seen.get(name), _Contents)]
        new = [name for name in names if name not in self._named]
        self._named.update(new)
        return [(name, type(self.attributes[name]).__name__) for name in new]

    def load(self, attributes: dict[str, Any]) -> None:
        shared = {name: value for name, value in attributes.items() if name not in self._own}
        self.attributes.update(shared)
        self._changed.update(shared)
        self.seen = self._read()

    def mark(self) -> None:
        self._marked = dict(zip(self.names, self.seen, strict=True))

    def marked(self) -> dict[str, Any]:
        values = {name: self._marked.get(name, _ABSENT) for name in self.changed()}
        absent = [name for name, value in values.items() if value is _ABSENT]
        return {"values": {name: value for name, value in values.items() if _is_stored(value)}, "absent": absent}

    def load_marked(self, marked: dict[str, Any]) -> None:
        for name in self.changed().keys() & set(marked["absent"]):
            del self.attributes[name]
        self.load(marked["values"])
        self._marked = marked["values"]

    def _read(self) -> list[Any]:
        if len(self.attributes) != self._size:
            self._size = len(self.attributes)
            known = self._ignored.union(self.names)
            self.names += [name for name in self.attributes if name not in known and not name.startswith("_")]
        get, kept = self.attributes.get, self.kept
        return [
            value if type(value := get(name, _ABSENT)) in kept else self.plain_or_other(value) for name in self.names
        ]

    def plain_or_other(self, value: Any) -> Any:
        if isinstance(value, _CONTAINERS):
            return _Contents.of(value)
        is_plain = all(map(self._is_number_or_text, value)) if type(value) is tuple else self._is_number_or_text(value)
        return value if is_plain or value is _ABSENT else _OTHER

    def _is_number_or_text(self, value: Any) -> bool:
        if type(value) is str:
            return value.isascii() or value.encode(errors="ignore").decode() == value
        return type(value) in self.kept or isinstance(value, np.number)


class _Contents(tuple[Any, ...]):
    """Stands for a container: what can be compared of its items, without keeping objects alive."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> "_Contents":
        items = islice(value.items() if isinstance(value, dict) else value, _COMPARED_ITEMS)
        return cls((len(value), *map(_comparable, items)))


def _comparable(item: Any) -> Any:
    if isinstance(item, tuple):  # of a dict
        return tuple(map(_comparable, item))
    if isinstance(item, _CONTAINERS):
        return len(item)
    return item if type(item) in _PLAIN or type(item) is str else type(item).__name__


def _is_stored(value: Any) -> bool:
    return value is not _ABSENT and value is not _OTHER and not isinstance(value, _Contents)


def _is_same(old: object, new: object) -> bool:
    return type(old) is type(new) and old == new
