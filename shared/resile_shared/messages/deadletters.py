"""Messages that could not be read or handled."""

from pydantic import Field

from .message import Message, Text, Time

MAX_HEADERS = 20
MAX_BODY = 4096


class DeadLetter(Message):
    """A message that had no effect, and why."""

    subject: Text
    service: Text = Field(description="who gave up on it")
    reason: Text
    time: Time
    headers: dict[Text, Text] = Field(default_factory=dict, max_length=MAX_HEADERS)
    body: str = Field(max_length=MAX_BODY, description="as text, cut short; what is not UTF-8 is escaped")
