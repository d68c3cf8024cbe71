"""The operations of the HTTP API, each declared at its handler: routes and docs/openapi.json follow from that."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel

Content = type[BaseModel] | str
"""What a body holds: JSON of a model, or any bytes of a media type."""
Method = TypeVar("Method", bound=Callable[..., Awaitable[web.StreamResponse]])
_ATTRIBUTE = "operation"


@dataclass(frozen=True)
class Operation:
    """One request, and its answer; the decorator of the method that carries it out."""

    method: str
    path: str
    summary: str
    answer: Content
    status: int = 200
    body: Content | None = None
    query: type[BaseModel] | None = None
    streams: type[BaseModel] | None = None
    """What server-sent events carry, for a request that can follow."""
    is_keyed: bool = True
    """Whether a request repeated with its Idempotency-Key takes effect once; requests that only read have no key."""

    def __call__(self, handler: Method) -> Method:
        """Declare, as a decorator, that the method ``handler`` carries out this operation."""
        setattr(handler, _ATTRIBUTE, self)
        return handler


def operations_of(part: type) -> Iterator[tuple[str, Operation]]:
    """Yield the operations of a class of handlers, each with the name of its method."""
    for name, method in vars(part).items():
        if declared := getattr(method, _ATTRIBUTE, None):
            yield name, declared


def routes_of(part: Any) -> list[web.RouteDef]:
    """Return the routes of an object of such a class. A HEAD is refused where the answer may be long."""
    return [
        web.route(
            operation.method.upper(),
            operation.path,
            getattr(part, name),
            **({"allow_head": False} if _may_be_long(operation) else {}),
        )
        for name, operation in operations_of(type(part))
    ]


def _may_be_long(operation: Operation) -> bool:
    return operation.method == "get" and (operation.streams is not None or isinstance(operation.answer, str))
