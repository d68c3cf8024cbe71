"""The header of a call: what each member sends to all others before anything is exchanged."""

from typing import NamedTuple

import orjson


class CallHeader(NamedTuple):
    """What a member calls, and what it knows."""

    generation: int
    """The newest generation that the member has formed."""
    call: str
    """The call as text, with the dtypes and shapes of what is reduced."""
    is_leaving: bool = False
    is_enrolled: bool = False
    """Whether the member has announced itself at a new rendezvous, after the loss of its own."""
    digest: str = ""
    """Digest of the state, where initial members compare it; empty elsewhere."""

    def encode(self) -> bytes:
        """Return the header as bytes."""
        return orjson.dumps(list(self))

    @staticmethod
    def decode(data: bytes) -> "CallHeader":
        """The inverse of ``encode``."""
        return CallHeader(*orjson.loads(data))
