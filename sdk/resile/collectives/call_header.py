"""The header of a call: what each member sends to all others before anything is exchanged."""

from typing import NamedTuple

import orjson


class CallHeader(NamedTuple):
    """What a member calls, and what it knows."""

    generation: int
    """The newest that it has formed."""
    call: str
    """As text, with the dtypes and shapes of what is reduced."""
    is_leaving: bool = False
    is_enrolled: bool = False
    """Whether it has announced itself at a new rendezvous, after the loss of its own."""
    digest: str = ""
    """Of the state, where initial members compare it."""

    def encode(self) -> bytes:
        """As bytes."""
        return orjson.dumps(list(self))

    @staticmethod
    def decode(data: bytes) -> "CallHeader":
        """The inverse of ``encode``."""
        return CallHeader(*orjson.loads(data))
