"""The largest JSON that a model of messages allows."""

from collections.abc import Iterable
from datetime import datetime
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import MaxLen
from pydantic import AwareDatetime, BaseModel
from pydantic.fields import FieldInfo

ESCAPED = 6
"""Bytes of a control character in JSON."""
_LENGTHS = {"{1,64}$": 64, "{1,255}$": 255, "/[0-9]{1,4}$": 69}
_SIMPLE: dict[Any, int] = {NoneType: 4, bool: 5, float: 25, datetime: 26, AwareDatetime: 26}


def largest(model: type[BaseModel], *, leave_out: Iterable[str] = ()) -> int:
    """Return the most bytes that a message takes. Raises AssertionError when there is no maximum."""
    fields = {name: field for name, field in model.model_fields.items() if name not in leave_out}
    return 2 + sum(
        len(name) + 4 + _largest(field.annotation, list(field.metadata), f"{model.__name__}.{name}")
        for name, field in fields.items()
    )


def _largest(annotation: Any, metadata: list[Any], where: str) -> int:
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for item in more:
            metadata = [*metadata, *(item.metadata if isinstance(item, FieldInfo) else [item])]
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if get_origin(annotation) in (Union, UnionType):
        return max(_largest(part, metadata, where) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return max(len(str(value)) for value in get_args(annotation)) + 2
    if get_origin(annotation) in (tuple, dict):
        parts = [part for part in get_args(annotation) if part is not Ellipsis]
        return 2 + _max_length(metadata, where) * sum(_largest(part, [], where) + 1 for part in parts)
    return _largest_of_class(annotation, metadata, where)


def _largest_of_class(kind: type, metadata: list[Any], where: str) -> int:
    if kind is int:
        limits = [getattr(item, "le", None) or getattr(item, "lt", None) for item in metadata]
        assert any(limits), f"{where}: an integer of any size"
        return 1 + min(len(str(limit)) for limit in limits if limit)
    if kind is str:
        pattern = next((found for item in metadata if (found := getattr(item, "pattern", None))), "")
        lengths = [length for end, length in _LENGTHS.items() if pattern.endswith(end)]
        return 2 + lengths[0] if lengths else 2 + ESCAPED * _max_length(metadata, where)
    if issubclass(kind, Enum):
        return max(len(str(member.value)) for member in kind) + 2
    assert issubclass(kind, BaseModel), f"{where}: {kind}"
    return largest(kind, leave_out=("args", "env", "unpublished"))


def _max_length(metadata: list[Any], where: str) -> int:
    length = next((item.max_length for item in metadata if isinstance(item, MaxLen)), None)
    assert length is not None, f"{where}: of any length"
    return int(length)
