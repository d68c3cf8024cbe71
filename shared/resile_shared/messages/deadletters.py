"""Messages that could not be read or handled."""

from pydantic import Field

from .message import Message, Time


class DeadLetter(Message):
    """A message that had no effect, and why."""

    subject: str
    service: str = Field(description="who gave up on it")
    reason: str
    time: Time
    headers: dict[str, str] = Field(default_factory=dict)
    body: str = Field(description="as text, cut short; what is not UTF-8 is escaped")
