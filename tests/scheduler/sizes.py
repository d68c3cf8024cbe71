"""How much an object holds: the elements of all collections that can be reached from it."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

from pydantic import BaseModel

_LEAVES = (str, bytes, int, float, bool, type, Enum, FunctionType, MethodType, ModuleType, type(None))


def num_elements(root: object) -> int:
    """Count them; what is reached twice counts once."""
    seen: set[int] = set()
    kept: list[object] = []
    waiting = [root]
    count = 0
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)  # so that no other object gets its id
        parts = _parts(thing)
        count += len(parts) if isinstance(thing, Mapping | list | tuple | set | frozenset | deque) else 0
        waiting += parts
    return count


def _parts(thing: Any) -> list[object]:
    if isinstance(thing, BaseModel):
        return [getattr(thing, name) for name in type(thing).model_fields]
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return list(thing)
    slots = [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    return [*slots, *getattr(thing, "__dict__", {}).values()]
