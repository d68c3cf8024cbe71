"""The root of all messages, and the types that many of them share."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer


class Message(BaseModel):
    """Root of all messages: frozen, and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def timestamp(time: datetime) -> str:
    """ISO 8601 in UTC with milliseconds, as in ``2026-01-02T03:04:05.678Z``."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def at(seconds: float) -> datetime:
    """Return the time ``seconds`` after the epoch, in UTC, to the millisecond."""
    return _to_milliseconds(datetime.fromtimestamp(seconds, UTC))


def _to_milliseconds(time: datetime) -> datetime:
    """Drop what the JSON form does not carry, so that a message equals itself after a journey."""
    utc = time.astimezone(UTC)
    return utc.replace(microsecond=utc.microsecond // 1000 * 1000)


Time = Annotated[
    AwareDatetime, AfterValidator(_to_milliseconds), PlainSerializer(timestamp, return_type=str, when_used="json")
]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="letters, digits, - and _; at most 64")]
SlotName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}/[0-9]{1,4}$", description="<host>/<index>")]
