"""CloudEvents 1.0 in binary mode: what goes into a message's headers, and how a message is read back.

The body is the model as JSON; ``ce-type`` is ``resile.<name of the model>``; W3C ``traceparent`` carries the trace.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from opentelemetry.propagate import inject
from pydantic import BaseModel, RootModel, ValidationError

from .errors import ResileError
from .messages.message import timestamp

M = TypeVar("M", bound=BaseModel)


class Malformed(ResileError):
    """A message that cannot be read; its text says why."""


@dataclass(frozen=True)
class Received(Generic[M]):
    """A message as it arrived."""

    message: M
    subject: str
    id: str
    source: str
    time: str
    sequence: int | None = None
    """Its place in its stream, if it came from one."""
    stored: datetime | None = None
    """When that stream took it in."""


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
    """Read a message. Raises Malformed."""
    if headers is None or headers.get("ce-specversion") != "1.0":
        raise Malformed("it is no CloudEvent: the header ce-specversion must be 1.0")
    for name in ("ce-id", "ce-source", "ce-type"):
        if not headers.get(name):
            raise Malformed(f"the header {name} is missing")
    if headers["ce-type"] != type_of(model) and not issubclass(model, RootModel):
        raise Malformed(f"its type is {headers['ce-type']}, and here {type_of(model)} is expected")
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
    )


def describe(error: ValidationError) -> str:
    """All that is wrong, in one line."""
    faults = []
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(part) for part in fault["loc"])
        faults.append(f"{where}: {fault['msg']}" if where else fault["msg"])
    return "; ".join(faults).replace("\n", " ")
