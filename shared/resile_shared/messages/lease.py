"""Which scheduler leads. There is no time-to-live: a standby that sees the counter stand still takes over."""

from pydantic import Field

from .message import Count, Id, Message, Positive


class Lease(Message):
    """Held by the scheduler that decides. Taking it raises the epoch, by compare-and-set."""

    epoch: Positive
    holder: Id
    counter: Count = Field(description="the holder raises it; unchanged for too long means that it is gone")
    position: Count = Field(
        default=0, description="sequence of the newest report whose effects are stored: the next leader goes on there"
    )
    is_released: bool = Field(default=False, description="the holder ended, and nobody has to wait for it")
