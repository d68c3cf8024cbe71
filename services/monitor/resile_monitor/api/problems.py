"""Every failure as a problem document (RFC 9457): one line that says what is wrong and what to do."""

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Literal

from aiohttp import web

from resile_shared.errors import ResileError
from resile_shared.http.api import Problem
from resile_shared.storage.objects import MissingObjectError

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Code = Literal[
    "malformed",
    "invalid",
    "unknown",
    "conflict",
    "unavailable",
    "unauthorized",
    "too large",
    "timeout",
    "internal",
    "failed",
    "busy",
    "lost",
    "late",
]
_STATUSES: dict[Code, HTTPStatus] = {
    "malformed": HTTPStatus.BAD_REQUEST,
    "invalid": HTTPStatus.UNPROCESSABLE_ENTITY,
    "unknown": HTTPStatus.NOT_FOUND,
    "conflict": HTTPStatus.CONFLICT,
    "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "unauthorized": HTTPStatus.UNAUTHORIZED,
    "too large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "timeout": HTTPStatus.REQUEST_TIMEOUT,
    "internal": HTTPStatus.INTERNAL_SERVER_ERROR,
    "failed": HTTPStatus.INTERNAL_SERVER_ERROR,
    "busy": HTTPStatus.SERVICE_UNAVAILABLE,
    "lost": HTTPStatus.BAD_GATEWAY,
    "late": HTTPStatus.GATEWAY_TIMEOUT,
}


class ProblemError(ResileError):
    """A request that failed, and why."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception of a handler into a problem document."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _of_http(error, request)
    except Exception as error:
        if request.writer.output_size > 0:  # a response is in progress: only the connection can be closed
            raise
        return _of(error, request)


def _of(error: Exception, request: web.Request) -> web.Response:
    match error:
        case ProblemError(code=code):
            return _response(_STATUSES[code], code, str(error))
        case MissingObjectError():
            return _response(HTTPStatus.NOT_FOUND, "unknown", str(error))
        case ResileError():
            logger.warning("%s %s: %s", request.method, request.path, error)
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", str(error))
        case _:
            logger.exception("%s %s failed", request.method, request.path)
            detail = f"internal error in the monitor ({type(error).__name__}): see its log"
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail)


def _of_http(error: web.HTTPException, request: web.Request) -> web.Response:
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            response = _response(
                error.status, "invalid", f"{request.path} does not support {error.method}: use {allowed}"
            )
            response.headers["Allow"] = allowed
            return response
        case web.HTTPNotFound():
            return _response(404, "unknown", f"unknown path {request.path}: docs/api.md lists all requests")
        case web.HTTPRequestEntityTooLarge():
            return _response(413, "too large", f"request body too large: {error.text}")
        case _:
            return _response(error.status, "malformed", f"malformed request: {error.text or error.reason}")


def _response(status: int, code: Code, detail: str) -> web.Response:
    title = HTTPStatus(status).phrase
    problem = Problem(title=title, status=status, detail=" ".join(detail.split()), code=code)
    headers = {"WWW-Authenticate": "Bearer"} if code == "unauthorized" else {}
    return web.Response(
        body=problem.model_dump_json(), status=status, headers=headers, content_type="application/problem+json"
    )
