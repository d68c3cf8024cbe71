"""What each shard has, given to all workers over as many rounds as it takes, whoever holds the shard in each."""

import struct
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .rows import decode, encode

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


class ShardTensors:
    """Tensors of each shard, those that ``compute`` returns on the worker that holds it."""

    def __init__(self, num_shards: int, compute: Callable[[int], list[Tensor]]) -> None:
        self._num_shards = num_shards
        self._compute = compute
        self._gathering = Gathering()
        self._own: dict[int, list[Tensor]] = {}
        self._contents: dict[int, bytes] = {}
        """What this worker has computed of each of its shards, and the same in bytes, as far as it was asked for."""

    def is_complete(self, *, is_alone: bool) -> bool:
        """Whether everything was received; a worker that is alone receives nothing of what it has computed."""
        lacking = [shard for shard in range(self._num_shards) if self._gathering.lacks(shard)]
        return all(is_alone and shard in self._own for shard in lacking)

    def pieces(self, held: Iterable[int], *, at_most: int) -> bytes:
        """Return what a worker that holds the shards ``held`` sends next; with ``at_most`` 0 bytes, nothing."""
        lacking = [shard for shard in held if self._gathering.lacks(shard)]
        for shard in lacking:
            self.own(shard)
        return self._gathering.pieces(lacking, self._content, at_most=at_most) if at_most else b""

    def receive(self, pieces: Iterable[bytes]) -> None:
        """Take over what all workers have sent in a round."""
        for piece in pieces:
            self._gathering.add(piece)

    def own(self, shard: int) -> list[Tensor]:
        """Return the tensors of a shard as this worker computes them."""
        if shard not in self._own:
            self._own[shard] = self._compute(shard)
        return self._own[shard]

    def keep(self, shard: int, tensors: list[Tensor]) -> None:
        """Take the tensors of a shard that this worker has computed."""
        self._own[shard] = tensors
        self._contents.pop(shard, None)

    def forget_own(self) -> None:
        """The shards are computed again."""
        self._own.clear()
        self._contents.clear()

    def all(self, device: torch.device) -> list[list[Tensor]]:
        """Return the tensors of all shards, in their order."""
        shards = range(self._num_shards)
        return [self._own[shard] if shard in self._own else self._decoded(shard, device) for shard in shards]

    def _decoded(self, shard: int, device: torch.device) -> list[Tensor]:
        return [each for each in decode(self._gathering[shard], device)[shard] if each is not None]

    def _content(self, shard: int) -> bytes:
        if shard not in self._contents:
            self._contents[shard] = encode({shard: self.own(shard)})
        return self._contents[shard]
