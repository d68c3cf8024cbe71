"""Which scheduler leads. There is no time-to-live: a standby that sees the counter stand still takes over."""

from pydantic import Field

from .message import Id, Message


class Lease(Message):
    """Held by the scheduler that decides. Taking it raises the epoch, by compare-and-set."""

    epoch: int = Field(ge=1)
    holder: Id
    counter: int = Field(ge=0, description="the holder raises it; unchanged for too long means that it is gone")
    position: int = Field(
        default=0,
        ge=0,
        description="sequence of the newest report whose effects are stored: the next leader goes on there",
    )
    is_released: bool = Field(default=False, description="the holder ended, and nobody has to wait for it")
