"""How far the outbox has come."""

from pydantic import Field

from .message import Message


class Cursor(Message):
    """Items of a job's history up to ``number`` are published."""

    number: int = Field(ge=0)
