"""How a client speaks to a pool: requests that are retried and take effect once, downloads, and followed streams."""

import asyncio
import contextlib
import errno
import os
import re
import secrets
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from resile_shared.errors import ResileError, UsageError
from resile_shared.http import api

PATIENCE_SECONDS = 60.0  # longer than one silent read
_PAUSE_SECONDS = 0.5
_RETRY_SECONDS = 15.0  # longer than a monitor takes to start again
_KEY_HEADER = "Idempotency-Key"
_KEY = re.compile(r"[!-~]{1,200}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_AGAIN = f"with the same {_KEY_HEADER}"
_TRANSFERS = 3
"""A download is attempted at most this many times: a file of a running job may be replaced while it is sent."""
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""Errors after which a request is sent again."""
_NOT_UNDERSTOOD = (aiohttp.ClientError, UnicodeError)
"""All other errors of a request: the answer is not HTTP, redirects are endless, or the address is invalid."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
LISTING_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=1800)
"""The timeout of a request for which the pool may list millions of files."""

V = TypeVar("V", bound=BaseModel)


@dataclass(frozen=True)
class ServerSent:
    """One event: its data, and the id of this one or the last that had one. No data: only the id is new."""

    id: str
    data: str


async def read_events(pieces: AsyncIterable[bytes]) -> AsyncIterator[ServerSent]:
    """Turn an answer, in pieces of any size, into server-sent events, as the HTML standard (section 9.2) has them.

    One that is cut off is dropped.
    """
    name, is_news = "", False
    data: list[str] = []
    async for line in _lines(pieces):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            name, is_news = value, True
        elif field == "data":
            data.append(value)
        elif not field and not value and (data or is_news):
            yield ServerSent(name, "\n".join(data))
            data, is_news = [], False


async def _lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield lines of any length without their ends; aiohttp itself fails on long ones."""
    rest: list[bytes] = []
    async for piece in pieces:
        first, *others = piece.split(b"\n")
        rest.append(first)
        for other in others:
            yield b"".join(rest).rstrip(b"\r").decode(errors="replace")
            rest = [other]


@dataclass(frozen=True)
class Server:
    """URL and token of a pool's API."""

    url: str
    token: str
    advice: str = "check that it is up, and its address"
    """Advice for the user when the pool does not answer."""
    is_supervised: bool = False
    """Whether `resile up` on this machine restarts the server when it exits."""

    def __post_init__(self) -> None:
        """Raise UsageError if a header cannot hold the token: no pool has such a token."""
        if not (self.token.isascii() and self.token.isprintable()):
            raise UsageError(f"the token for {self.url} has characters that no token has: check RESILE_TOKEN")


class Unreachable(ResileError):
    """The pool does not answer."""

    def __init__(self, server: Server, why: str) -> None:
        super().__init__(f"the pool at {server.url} does not answer ({why}): {server.advice}")


class NoPool(ResileError):
    """Something other than a pool answers, or the address is invalid."""

    def __init__(self, server: Server) -> None:
        super().__init__(
            f"{server.url} does not answer like a pool of this version: check the address, or update Resile"
        )


class TransferBroken(ResileError):
    """A download broke off."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the download of {path} broke off {_TRANSFERS} times: a file may have been replaced meanwhile by its job; "
            "try again, or when it is not written any more"
        )


class Refused(ResileError):
    """The pool rejected the request. ``code`` is that of `api.Problem`, empty if something else answered."""

    def __init__(self, detail: str, *, status: int, code: str = "") -> None:
        super().__init__(detail)
        self.status, self.code = status, code

    def with_key(self, key: str) -> "Refused":
        """Return the error with the key of the request, if its text says that the key should be used again."""
        if _AGAIN not in str(self):
            return self
        return Refused(f"{self} (--idempotency-key {key})", status=self.status, code=self.code)


def callers_trace() -> dict[str, str]:
    """Return the headers by which the pool continues the trace of the caller, if it is in one.

    That is the current span of a program with OpenTelemetry, or what ``TRACEPARENT`` names, as CI systems set it.
    """
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        inject(headers)
    if not headers and _TRACEPARENT.fullmatch(parent := os.environ.get("TRACEPARENT", "")):
        state = os.environ.get("TRACESTATE", "")
        headers = {"traceparent": parent, **({"tracestate": state} if state.isascii() and state.isprintable() else {})}
    return headers


def is_outage(error: Unreachable | Refused) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, Unreachable) or error.status >= 500


class HttpRequests:
    """The connection of one client to one pool."""

    def __init__(self, server: Server, *, idempotency_key: str | None = None) -> None:
        """``idempotency_key`` is that of the one command that is sent; without it, each has a new one."""
        if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
            raise UsageError("an idempotency key must be 1 to 200 visible ASCII characters: choose another one")
        self.server = server
        self._idempotency_key = idempotency_key
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.token}"}, timeout=_TIMEOUT)

    async def close(self) -> None:
        """Disconnect."""
        await self._http.close()

    async def get(self, model: type[V], path: str, **query: str | int) -> V:
        """Return what ``GET path`` answers."""
        return self.parse(model, await self.request("GET", path, params=query))

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Send a JSON body; return the answer."""
        return await self.request("POST", path, json=body)

    async def request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> bytes:
        """Send until there is an answer; the idempotency key makes the request take effect once."""
        key = self._idempotency_key or secrets.token_hex(16)
        keyed = {_KEY_HEADER: key, **callers_trace(), **(headers or {})}
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                async with self._http.request(method, self._url(path), headers=keyed, **options) as answer:
                    await _check(answer, self.server)
                    return await answer.read()
            except _BROKEN as error:
                is_refused = isinstance(error, aiohttp.ClientConnectorError) and not self.server.is_supervised
                if is_refused or time.monotonic() > deadline:
                    raise Unreachable(self.server, _reason(error)) from error
            except _NOT_UNDERSTOOD as error:
                raise NoPool(self.server) from error
            except Refused as error:
                if error.status != 503 or time.monotonic() > deadline:
                    raise error.with_key(key) from None
            await asyncio.sleep(_PAUSE_SECONDS)

    async def call(self, path: str, body: bytes, *, seconds: float) -> bytes:
        """Send a request that may have an effect each time; return the answer.

        It is sent again only if it did not arrive, or if the answer says that it had no effect.
        """
        deadline = time.monotonic() + seconds
        headers = {"Content-Type": "application/json", **callers_trace()}
        while (left := deadline - time.monotonic()) > 0:
            timeout = aiohttp.ClientTimeout(total=left + _RETRY_SECONDS, sock_connect=10)
            query = {"seconds": f"{left:.3f}"}
            try:
                async with self._http.post(
                    self._url(path), data=body, params=query, headers=headers, timeout=timeout
                ) as answer:
                    await _check(answer, self.server)
                    return await answer.read()
            except aiohttp.ClientConnectorError as error:
                if not self.server.is_supervised:
                    raise Unreachable(self.server, _reason(error)) from error
            except _BROKEN as error:
                raise Unreachable(self.server, f"{_reason(error)}; the request may have had its effect") from error
            except _NOT_UNDERSTOOD as error:
                raise NoPool(self.server) from error
            except Refused as error:
                if error.status != 503:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)
        raise Unreachable(self.server, f"not within {seconds:g} seconds")

    async def download(self, path: str, file: Path, **query: str) -> None:
        """Write the answer to ``file``, whole or not at all. Raises TransferBroken if it breaks off each time."""
        draft = file.with_name(f".{file.name}.partial")
        try:
            for _ in range(_TRANSFERS - 1):
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    await self._receive(path, draft, query)
                    break
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                await self._receive(path, draft, query)
            draft.replace(file)
        except aiohttp.ClientPayloadError as error:
            raise TransferBroken(path) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(self.server, _reason(error)) from error
        finally:
            draft.unlink(missing_ok=True)

    async def _receive(self, path: str, file: Path, query: Mapping[str, str]) -> None:
        async with self._http.get(self._url(path), params=query) as answer:
            await _check(answer, self.server)
            with file.open("wb") as target:
                async for part in answer.content.iter_chunked(1 << 20):
                    target.write(part)

    async def follow(self, model: type[V], path: str, **query: str | int) -> AsyncIterator[V]:
        """Yield events, resuming after the last one when the connection breaks. Raises Unreachable after a minute."""
        last = ""
        broken_since: float | None = None
        while True:
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
            try:
                async with self._http.get(self._url(path), params={**query, "follow": 1}, headers=headers) as answer:
                    await _check(answer, self.server)
                    if answer.status == 204:  # nothing more will come
                        return
                    broken_since = None
                    async for event in read_events(answer.content.iter_any()):
                        last = event.id or last
                        if event.data:
                            yield self.parse(model, event.data)
                    why = "connection closed"
            except _BROKEN as error:
                why = _reason(error)
            except _NOT_UNDERSTOOD as error:
                raise NoPool(self.server) from error
            except Refused as error:
                if error.status < 500:
                    raise
                why = str(error)
            now = time.monotonic()
            broken_since = now if broken_since is None else broken_since
            if now - broken_since > PATIENCE_SECONDS:
                raise Unreachable(self.server, why)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _url(self, path: str) -> str:
        return f"{self.server.url}/v1/{path}"

    def parse(self, model: type[V], body: bytes | str) -> V:
        """Parse a body. Raises NoPool if it does not match the model."""
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise NoPool(self.server) from error


async def _check(answer: aiohttp.ClientResponse, server: Server) -> None:
    if answer.status < 400:
        return
    if answer.status == 401:
        raise Refused(
            f"the pool at {server.url} rejects this token: check RESILE_TOKEN", status=401, code="unauthorized"
        )
    try:
        problem = api.Problem.model_validate_json(await answer.read())
    except ValidationError:
        raise Refused(
            f"{server.url} answers {answer.status} {answer.reason}: check that a pool runs there", status=answer.status
        ) from None
    raise Refused(problem.detail, status=problem.status, code=problem.code)


def _reason(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    known = os.strerror(number) if number is not None and number in errno.errorcode else ""
    return known or str(cause) or type(cause).__name__
