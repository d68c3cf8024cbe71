"""What workers print."""

from typing import Literal

from pydantic import Field

from .message import Count, Id, Message, Positive, Time

MAX_LINE = 70_000
MAX_LINES = 1000


class LogLine(Message):
    """One line of output, without its end."""

    time: Time
    stream: Literal["stdout", "stderr"]
    text: str = Field(max_length=MAX_LINE)


class LogLines(Message):
    """Some lines of one source, in order."""

    job: Id
    host: Id
    incarnation: Positive
    worker: Count | None = Field(default=None, description="null: the build of the job's environment on this host")
    lines: tuple[LogLine, ...] = Field(max_length=MAX_LINES)
    dropped: Count = Field(default=0, description="lines dropped since the last batch because the buffer was full")
