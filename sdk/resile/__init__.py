"""Resile: elastic deep-learning training on machines that come and go, with the same bits every time.

`Client` and `AsyncClient` talk to a pool. They are loaded when they are first used: workers import this package, too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncClient as AsyncClient
    from .http_requests import Server as Server
    from .serving import idempotent as idempotent
    from .serving import remote as remote
    from .sync_client import Client as Client

__all__ = ["AsyncClient", "Client", "Server", "idempotent", "remote"]
_MODULES = {
    "AsyncClient": "client",
    "Client": "sync_client",
    "Server": "http_requests",
    "idempotent": "serving",
    "remote": "serving",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
