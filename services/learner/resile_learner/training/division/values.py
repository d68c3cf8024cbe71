"""Values of a script's variables: whether they have changed, and how they travel.

Only values do, never code: a worker restores them into the objects that its own script has made.
"""

import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from .deferred import Deferred, Stored, has_rows, is_deferred, values_of
from .frames import is_library
from .rows import decode, encode

MAX_BYTES = 16 << 20
"""The maximum size of a value that travels."""
MAX_COMPARED = 1 << 16
"""The number of items of a container that are compared; of a longer one, changes of its length are noticed.

It is divided by the number of containers that were looked at before in the same variable.
"""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CODE = (ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)
_DICTS: Mapping[str, Callable[[], dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: Mapping[str, Callable[[Iterable[Any]], Any]] = {"list": list, "tuple": tuple}
_SETS: Mapping[str, Callable[[Iterable[Any]], Any]] = {"set": set, "frozenset": frozenset}


class OpaqueValue(Exception):
    """A value that cannot travel."""


class LargeValue(Exception):
    """A value that is too large to travel."""


class Values:
    """How values are compared, stored and restored, except for objects whose values are in the state already.

    Within a variable each object is looked at once, so that cycles end.
    """

    def __init__(self, known: Iterable[object]) -> None:
        self._objects = list(known)
        modules = [each for each in self._objects if isinstance(each, nn.Module)]
        self._objects += [each for module in modules for each in module.modules()]
        self._ids = {id(each) for each in self._objects}
        tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
        self._memory = {each.data_ptr() for each in tensors if each.numel()}

    def _is_known(self, value: Any) -> bool:
        is_there = isinstance(value, Tensor) and not is_deferred(value) and value.layout == torch.strided
        return id(value) in self._ids or (is_there and value.data_ptr() in self._memory)

    def mark(self, value: Any) -> Any:
        """Return what differs if ``value`` has changed; the same for all values that cannot travel."""
        return self._mark(value, {})

    def _mark(self, value: Any, seen: dict[int, Any]) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        if self._is_known(value) or isinstance(value, _CODE) or id(value) in seen:
            return None
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _mark_array(value)
        seen[id(value)] = value  # kept, or another object could get its id
        most = MAX_COMPARED // len(seen)
        if isinstance(value, dict):
            items = islice(value.items(), most)
            return len(value), [(self._mark(key, seen), self._mark(item, seen)) for key, item in items]
        if isinstance(value, list | tuple | deque):
            return len(value), [self._mark(item, seen) for item in islice(value, most)]
        if isinstance(value, set | frozenset):
            return len(value), frozenset(item for item in islice(value, most) if isinstance(item, _PLAIN))
        if isinstance(value, _GENERATORS):
            return self._mark(_generator_state(value), seen)
        content = _content(value)
        return None if content is None else self._mark(content, seen)

    def encode(self, value: Any) -> Any:
        """Return ``value`` as a tree of plain values. Raises OpaqueValue or LargeValue."""
        return _Encoding(self._is_known).encode(value)

    def encode_attributes(self, module: nn.Module) -> Any:
        """Return the attributes of ``module`` and its parts as a tree of plain values. Raises LargeValue."""
        return _Encoding(self._is_known).encode_parts(_parts(module))


def _mark_array(value: Any) -> Any:
    if is_deferred(value):  # it is obtained only where it travels
        return id(value.source) if has_rows(value) else None
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.shape, value._version
        is_small = value.nbytes <= MAX_BYTES
        return value.shape, crc32(encode({0: [value]})) if is_small else (value.data_ptr(), value._version)
    if isinstance(value, np.ndarray):
        return value.shape, crc32(np.ascontiguousarray(value).tobytes()) if value.nbytes <= MAX_BYTES else 0
    return value.dtype, value.tobytes()


class _Encoding:
    """Encodes one value, of at most `MAX_BYTES`."""

    def __init__(self, is_known: Callable[[object], bool]) -> None:
        self._is_known = is_known
        self._left = MAX_BYTES
        self._seen: dict[int, tuple[int, Any]] = {}
        """The number of each object, and the object: it is kept, or another one could get its id."""

    def encode(self, value: Any) -> Any:
        if is_deferred(value) and not has_rows(value):  # an output that cannot be sent any more
            raise OpaqueValue
        if self._is_known(value):
            return ("known",)
        if id(value) in self._seen:
            return ("same", self._seen[id(value)][0])
        if isinstance(value, complex):
            return ("complex", value.real, value.imag)
        if isinstance(value, _PLAIN):
            self._take(len(value) if isinstance(value, str | bytes) else 8)
            return value
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise OpaqueValue
        if isinstance(value, Tensor | np.ndarray | np.generic):
            self._take(value.nbytes)
            return _encode_array(value)
        number = len(self._seen)
        self._seen[id(value)] = number, value
        return ("new", number, self._encode_object(value))

    def _take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise LargeValue

    def _each(self, values: Iterable[Any]) -> list[Any]:
        return [self.encode(value) for value in values]

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, dict):
            name = type(value).__name__ if type(value).__name__ in _DICTS else "dict"
            return (name, self._each(value.keys()), self._each(value.values()))
        if isinstance(value, deque):
            return ("deque", self._each(value), [value.maxlen])
        for kind in (list, set, frozenset):
            if type(value) is kind:
                return (kind.__name__, self._each(value))
        if isinstance(value, tuple):
            return ("tuple", self._each(value))
        if isinstance(value, _GENERATORS):
            return ("generator", type(value).__name__, self.encode(_generator_state(value)))
        return self._encode_attributes(value)

    def _encode_attributes(self, value: Any) -> Any:
        if (content := _content(value)) is None:
            raise OpaqueValue
        if isinstance(value, nn.Module):
            state, parts = content
            return ("module", self.encode(state), self.encode_parts(parts))
        if has_state(value):
            return ("state", self.encode(content))
        return ("object", type(value).__module__, type(value).__qualname__, self._encode_each(content))

    def encode_parts(self, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Encode the attributes of the parts of a module, by their paths."""
        return {path: self._encode_each(each) for path, each in parts.items()}

    def _encode_each(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Encode attributes; one that cannot travel stays what the script has made it."""
        encoded = {}
        for name, item in attributes.items():
            try:
                encoded[name] = self.encode(item)
            except OpaqueValue:
                continue
        return encoded


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def _generator_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)


def _set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif value is not None:
        value.set_state(state)


def _encode_array(value: Any) -> Any:
    if has_rows(value):
        return ("deferred", encode({0: [values_of(value)]}))
    if isinstance(value, Tensor):
        return ("tensor", encode({0: [value]}))
    try:
        content = torch.from_numpy(np.array(value, copy=True))
    except TypeError:
        raise OpaqueValue from None
    return ("scalar" if isinstance(value, np.generic) else "array", encode({0: [content]}))


@torch.no_grad()
def restore(present: Any, encoded: Any) -> Any:
    """Return the value that was encoded, as ``present`` itself if that can hold it: others may refer to it."""
    return _Restoring().restore(present, encoded)


@torch.no_grad()
def restore_attributes(module: nn.Module, encoded: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the attributes of ``module`` and its parts that `Values.encode_attributes` has encoded."""
    _Restoring().restore_parts(module, encoded)


class _Restoring:
    """Restores one value."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def restore(self, present: Any, encoded: Any) -> Any:
        if type(encoded) is not tuple:
            return encoded
        kind, *content = encoded
        match kind:
            case "known":
                return present
            case "same":
                return self._made.get(content[0], present)
            case "new":
                number, inner = content
                self._made[number] = present  # for what is inside it
                self._made[number] = made = self._restore_object(present, *inner)
                return made
            case "complex":
                return complex(*content)
        return _restore_array(present, kind, content[0])

    def _restore_object(self, present: Any, kind: str, *content: Any) -> Any:
        match kind:
            case "state":
                self._restore_state(present, content[0])
                return present
            case "module":
                state, parts = content
                self._restore_state(present, state)
                if present is not None:
                    self.restore_parts(present, parts)
                return present
            case "generator":
                _set_generator_state(present, self.restore(None, content[1]))
                return present
            case "object":
                return self._restore_attributes(present, *content)
        return self._restore_container(present, kind, *content)

    def _restore_attributes(self, present: Any, module: str, name: str, attributes: Mapping[str, Any]) -> Any:
        """Set the attributes of an object of the script, which is made if the script has not: without a call."""
        if present is None and (own := _own_class(module, name)):
            present = object.__new__(own)
        if present is not None:
            self._set_attributes(present, attributes)
        return present

    def restore_parts(self, module: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> None:
        modules = dict(module.named_modules())
        for path in parts.keys() & modules.keys():
            self._set_attributes(modules[path], parts[path])

    def _set_attributes(self, present: Any, attributes: Mapping[str, Any]) -> None:
        for attribute, item in attributes.items():
            value = self.restore(getattr(present, attribute, None), item)
            if isinstance(present, nn.Module) and attribute in present._buffers:
                present._buffers[attribute] = value
            else:
                object.__setattr__(present, attribute, value)

    def _restore_state(self, present: Any, encoded: Any) -> None:
        """Load a state; the object has its known parts itself, such as a model of the run that it refers to."""
        if present is None:
            return
        own = present.state_dict()
        present.load_state_dict(self.restore(dict(own) if isinstance(own, dict) else own, encoded))

    def _restore_container(self, present: Any, kind: str, items: list[Any], values: Iterable[Any] = ()) -> Any:
        if kind in _DICTS:
            keys = [self.restore(None, each) for each in items]
            old = present if isinstance(present, dict) else {}
            pairs = [(key, self.restore(old.get(key), value)) for key, value in zip(keys, values, strict=True)]
            target = present if isinstance(present, dict) else _DICTS[kind]()
            target.clear()
            for key, value in pairs:  # update() of a Counter counts
                target[key] = value
            return target
        if kind in _SETS:
            found = _SETS[kind](self.restore(None, each) for each in items)
            if type(present) is not set:
                return found
            present.clear()
            present.update(found)
            return present
        old_items = list(present) if isinstance(present, list | tuple | deque) else []
        old_items += [None] * len(items)
        restored = [self.restore(old, each) for old, each in zip(old_items, items, strict=False)]
        if type(present) in (list, deque):
            present.clear()
            present.extend(restored)
            return present
        if kind == "deque":
            return deque(restored, *values)
        return type(present)(*restored) if hasattr(present, "_fields") else _SEQUENCES[kind](restored)


def _own_class(module: str, name: str) -> type | None:
    """The class of the script with this name, which the script has defined here, too."""
    found: Any = sys.modules.get(module)
    if is_library(found):
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _restore_array(present: Any, kind: str, data: bytes) -> Any:
    tensor = decode(data, torch.device("cpu"))[0][0]
    assert tensor is not None
    if kind == "scalar":
        return tensor.numpy()[()]
    if kind == "array":
        return tensor.numpy()
    if kind == "deferred":
        return Deferred(Stored(tensor), tensor.shape, tensor.dtype, tensor.device)
    if isinstance(present, Tensor) and present.shape == tensor.shape and present.dtype == tensor.dtype:
        return present.copy_(tensor)
    return tensor


def has_state(value: Any) -> bool:
    """Whether ``value`` has PyTorch's pair of state methods."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _content(value: Any) -> Any:
    """What an object consists of: its state, or its attributes, which of a library's own objects must be values.

    Of a module both, with the attributes of each of its parts by their paths.
    """
    if has_state(value):
        try:
            state = value.state_dict()
        except Exception:  # of a library or of the user: it has no state now
            return None
        if not isinstance(value, nn.Module):
            return state
        return state, _parts(value)
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    if not attributes or is_library(sys.modules.get(type(value).__module__)):
        are_values = all(isinstance(each, (*_PLAIN, Tensor, np.ndarray)) for each in attributes.values())
        return attributes if attributes and are_values else None
    return attributes


def _parts(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {path: _attributes(part) for path, part in module.named_modules()}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module beside what PyTorch gives to each, such as its parameters, parts and hooks."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_MODULES or name == "training"}
    return attributes | {name: module._buffers[name] for name in module._non_persistent_buffers_set}


_OF_MODULES = frozenset((*vars(nn.Module()), "forward"))
