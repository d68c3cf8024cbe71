"""What each shard has, given to all workers over as many rounds as it takes, whoever holds the shard in each."""

import struct
from collections.abc import Callable, Iterable

_HEAD = struct.Struct("<IQQ")
"""The number of a shard, the bytes of all it has, and those of the piece that follows."""
_LEAST = 1 << 16
"""The least bytes that a worker sends in a round, if it has them."""


class Gathering:
    """The bytes of shards. All workers have received the same of them after each round."""

    def __init__(self) -> None:
        self._received: dict[int, bytearray] = {}
        self._totals: dict[int, int] = {}

    def lacks(self, shard: int) -> bool:
        """Whether a part of what ``shard`` has is still to be received."""
        return shard not in self._totals or len(self._received[shard]) < self._totals[shard]

    def pieces(self, shards: Iterable[int], content: Callable[[int], bytes], *, at_most: int) -> bytes:
        """Return what a worker that holds ``shards`` sends next, about ``at_most`` bytes of their ``content``."""
        left, found = max(at_most, _LEAST), []
        for shard in filter(self.lacks, shards):
            whole, begun = content(shard), len(self._received.get(shard, b""))
            piece = whole[begun : begun + left]
            found += [_HEAD.pack(shard, len(whole), len(piece)), piece]
            left -= len(piece)
            if left <= 0:
                break
        return b"".join(found)

    def add(self, data: bytes) -> None:
        """Take over the pieces that one worker has sent."""
        position = 0
        while position < len(data):
            shard, total, size = _HEAD.unpack_from(data, position)
            position += _HEAD.size
            self._totals[shard] = total
            self._received.setdefault(shard, bytearray()).extend(data[position : position + size])
            position += size

    def __getitem__(self, shard: int) -> bytes:
        """Everything that ``shard`` has."""
        return bytes(self._received[shard])
