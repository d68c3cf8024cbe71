"""Parses requests; each fault becomes one line of text."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from resile_shared.http.server import BODY_SECONDS
from resile_shared.validation import describe

from .problems import ProblemError

M = TypeVar("M", bound=BaseModel)
MAX_BODY_BYTES = 1 << 20
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


async def read_body(request: web.Request, model: type[M]) -> M:
    """Return the JSON body; an empty one counts as ``{}``."""
    async with body_time():
        body = await request.read()
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise ProblemError("malformed", f"invalid request body: must be JSON: {describe(error)}") from error
        raise ProblemError("invalid", f"invalid request body: {describe(error, model)}") from error


@asynccontextmanager
async def body_time(seconds: float = BODY_SECONDS) -> AsyncIterator[None]:
    """Raise ProblemError when a client takes longer than ``seconds`` to send a body, or a piece of it."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        detail = f"the request body, or the next piece of it, did not arrive within {seconds:g} seconds: try again"
        raise ProblemError("timeout", detail) from error


def build(model: type[M], fields: Mapping[str, object]) -> M:
    """Return a command with the fields from the path and the body of a request."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ProblemError("invalid", f"invalid request: {describe(error, model)}") from error


def read_query(request: web.Request, model: type[M]) -> M:
    """Return the query parameters."""
    try:
        return model.model_validate(dict(request.query))
    except ValidationError as error:
        raise ProblemError("invalid", f"invalid query: {describe(error, model)}") from error


def read_key(request: web.Request) -> str | None:
    """Return the idempotency key; None without one."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not _KEY.fullmatch(key):
        raise ProblemError("invalid", "Idempotency-Key must be 1 to 200 visible ASCII characters")
    return key


def answer(view: BaseModel, *, status: int = 200) -> web.Response:
    """Return a model as JSON."""
    return web.Response(body=view.model_dump_json(), status=status, content_type="application/json")
