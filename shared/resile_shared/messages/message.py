"""The root of all messages, and the types that many of them share.

Every text, number and collection of a message has a maximum, so that no sender can make a message, or a record that
holds what it said, larger than the bus takes. What is written for people is cut; anything else that is too long makes
the message invalid.
"""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from ..text import is_line

MAX_INTEGER = (1 << 53) - 1
"""The largest integer that all JSON parsers read exactly."""
MAX_TEXT = 2000
MAX_DETAILS = 20_000
MAX_KEY = 4096
MAX_SLOTS = 10_000
"""The maximum number of slots of one job, and no host has more."""


class Message(BaseModel):
    """Root of all messages: frozen, and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Derived(Message):
    """What a monitor makes of the messages of a stream. All monitors make the same of the same messages."""

    sequence: Annotated[int, Field(ge=0, le=MAX_INTEGER, description="every message of the stream up to it is in")]


def timestamp(time: datetime) -> str:
    """ISO 8601 in UTC with milliseconds, as in ``2026-01-02T03:04:05.678Z``."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def at(seconds: float) -> datetime:
    """Return the time ``seconds`` after the epoch, in UTC, to the millisecond."""
    return _to_milliseconds(datetime.fromtimestamp(seconds, UTC))


def _to_milliseconds(time: datetime) -> datetime:
    """Drop what the JSON form does not carry, so that a message equals itself after a journey."""
    try:
        utc = time.astimezone(UTC)
    except OverflowError:
        raise ValueError("the time is out of range") from None
    return utc.replace(microsecond=utc.microsecond // 1000 * 1000)


Time = Annotated[
    AwareDatetime, AfterValidator(_to_milliseconds), PlainSerializer(timestamp, return_type=str, when_used="json")
]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="letters, digits, - and _; at most 64")]
SlotName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}/[0-9]{1,4}$", description="<host>/<index>")]
CommandId = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Index = Annotated[int, Field(ge=0, lt=MAX_SLOTS)]
Port = Annotated[int, Field(gt=0, lt=65536)]
Key = Annotated[str, Field(max_length=MAX_KEY, description="of an object in storage, or a path")]
HostAddress = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:%-]{1,255}$", description="name or IP address of a host")]


def _check_line(text: str) -> str:
    if not is_line(text):
        raise ValueError("must have no control characters")
    return text


Line = Annotated[str, AfterValidator(_check_line)]
"""One line of text that tables and terminals show as it is."""
Version = Annotated[Line, Field(max_length=100, description="of Resile; empty: one that does not name itself yet")]


def _cut(text: object) -> object:
    return text[:MAX_TEXT] if isinstance(text, str) else text


def _cut_details(text: object) -> object:
    return text[-MAX_DETAILS:] if isinstance(text, str) else text


Text = Annotated[str, BeforeValidator(_cut), Field(max_length=MAX_TEXT)]
"""Text for people: what exceeds the maximum is cut off."""
Details = Annotated[str, BeforeValidator(_cut_details), Field(max_length=MAX_DETAILS)]
"""A traceback: if it is too long, its beginning is cut off, since the error is at its end."""
