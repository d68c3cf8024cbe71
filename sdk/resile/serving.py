"""Calling services, and what a class says of its methods (docs/serving.md).

::

    classifier = resile.remote("classify")
    classifier.predict([[1.0, 2.0]])
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import orjson

from resile_shared.calls import IDEMPOTENT

from .http_requests import Server
from .sync_client import Client

F = TypeVar("F", bound=Callable[..., Any])
SECONDS = 30.0


def idempotent(method: F) -> F:
    """Declare, as a decorator, that a method may be computed twice: a request whose replica is lost is sent again."""
    setattr(method, IDEMPOTENT, True)
    return method


class Remote:
    """A service, with its methods. Arguments are given by position or by name, and must have a form in JSON."""

    def __init__(self, name: str, client: Client, *, seconds: float) -> None:
        self._name = name
        self._client = client
        self._seconds = seconds

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method of the service. It raises Refused if a call fails, Unreachable if no pool answers."""
        if method.startswith("_"):
            raise AttributeError(f"methods of a service have no leading underscore: {method}")
        return partial(self._call, method)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        body = arguments(method, args, named)
        return orjson.loads(self._client.call(self._name, method, body, seconds=self._seconds))


def remote(name: str, *, server: Server | str | None = None, seconds: float = SECONDS) -> Remote:
    """Return the service ``name`` of the pool at ``server``, or of the one that `client.find_server` finds.

    Each call takes at most ``seconds``; it waits for a replica if there is none.
    """
    return Remote(name, Client(server), seconds=seconds)


def arguments(method: str, args: tuple[Any, ...], named: dict[str, Any]) -> bytes:
    """Return the body of a call. Raises TypeError."""
    if args and named:
        raise TypeError(f"{method}: give all arguments by position, or all by name")
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(named or args, default=_plain, option=options)
    except orjson.JSONEncodeError as error:
        raise TypeError(f"{method}: {error.__cause__ or error}") from error


def _plain(value: Any) -> Any:
    """Return an argument that JSON has no form for as one that it has: tensors become arrays."""
    if hasattr(value, "tolist"):
        return value.detach().tolist() if hasattr(value, "detach") else value.tolist()
    raise TypeError(f"an argument of type {type(value).__name__} has no form in JSON: give numbers, text or arrays")
