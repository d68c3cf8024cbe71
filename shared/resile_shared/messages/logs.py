"""What workers print."""

from typing import Literal

from pydantic import Field

from .message import Id, Message, Time


class LogLine(Message):
    """One line of output, without its end."""

    time: Time
    stream: Literal["stdout", "stderr"]
    text: str


class LogLines(Message):
    """Some lines of one worker, in order."""

    job: Id
    host: Id
    incarnation: int = Field(ge=1)
    worker: int = Field(ge=0)
    lines: tuple[LogLine, ...]
    dropped: int = Field(default=0, ge=0, description="lines dropped since the last batch, for want of room")
