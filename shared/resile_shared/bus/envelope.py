"""CloudEvents 1.0 in binary mode: encoding and decoding of messages.

The body is the model as JSON; ``ce-type`` is ``resile.<name of the model>``; W3C ``traceparent`` carries the trace.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from opentelemetry.propagate import inject
from pydantic import BaseModel, RootModel, ValidationError

from ..errors import ResileError
from ..messages.message import timestamp
from ..validation import describe

M = TypeVar("M", bound=BaseModel)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Malformed(ResileError):
    """A message that cannot be decoded; its text gives the reason."""


@dataclass(frozen=True)
class Received(Generic[M]):
    """A received message."""

    message: M
    subject: str
    id: str
    source: str
    time: str
    sequence: int | None = None
    """The sequence of the message in its stream; None: it is not stored."""
    stored: datetime | None = None
    """When the message was stored; None: it is not stored."""
    trace: str = ""
    """The trace in which the message was sent; empty: none."""


def type_of(model: type[BaseModel]) -> str:
    """Return the ``ce-type`` of a model's messages."""
    return f"resile.{model.__name__}"


def headers_for(message: BaseModel, *, source: str, message_id: str | None = None) -> dict[str, str]:
    """Return the headers of a new message, with the current trace."""
    headers = {
        "ce-specversion": "1.0",
        "ce-id": message_id or secrets.token_hex(16),
        "ce-source": source,
        "ce-type": type_of(type(message)),
        "ce-time": timestamp(datetime.now(UTC)),
        "content-type": "application/json",
    }
    inject(headers)
    return headers


def encode(message: BaseModel) -> bytes:
    """Return the body of a message."""
    return message.model_dump_json().encode()


def decode(
    model: type[M],
    *,
    subject: str,
    headers: Mapping[str, str] | None,
    body: bytes,
    sequence: int | None = None,
    stored: datetime | None = None,
) -> Received[M]:
    """Decode a message. Raises Malformed."""
    if headers is None or headers.get("ce-specversion") != "1.0":
        raise Malformed("not a CloudEvent: the header ce-specversion must be 1.0")
    for name in ("ce-id", "ce-source", "ce-type"):
        if not headers.get(name):
            raise Malformed(f"the header {name} is missing")
    if headers["ce-type"] != type_of(model) and not issubclass(model, RootModel):
        raise Malformed(f"unexpected type {headers['ce-type']}: must be {type_of(model)}")
    try:
        message = model.model_validate_json(body)
    except ValidationError as error:
        raise Malformed(describe(error)) from error
    return Received(
        message=message,
        subject=subject,
        id=headers["ce-id"],
        source=headers["ce-source"],
        time=headers.get("ce-time", ""),
        sequence=sequence,
        stored=stored,
        trace=_trace_of(headers.get("traceparent", "")),
    )


def _trace_of(traceparent: str) -> str:
    """Return the trace id of a W3C header, as in ``00-<trace>-<span>-01``; empty for another text."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else ""
