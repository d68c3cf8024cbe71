"""Batches and outputs as trees of tensors, cut into the rows of shards and joined again."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import orjson
import torch
from torch import Tensor

from ...collectives.tree import ranges
from ...state.memory import byte_view, dtype_name, dtype_named, tensor_bytes
from .deferred import has_rows

NUM_COMPARED = 4096
"""The number of elements of a tensor that members compare."""
MAX_BYTES = 8 << 20
"""The maximum size of all rows that one round sends in headers, whose own limit is twice that."""
MAX_SENT_BYTES = 1 << 20
"""The maximum size of an output that is sent to all workers before the body uses it."""
MAX_OUTPUT_BYTES = 256 << 20
"""The maximum size of an output that is sent for each batch. It takes several rounds."""


class Cut(NamedTuple):
    """How the rows of a call are divided."""

    num_rows: int
    num_shards: int

    def rows(self, shard: int) -> slice:
        """The rows of one shard."""
        return slice(self.num_rows * shard // self.num_shards, self.num_rows * (shard + 1) // self.num_shards)

    def size(self, shard: int) -> int:
        """How many rows one shard has."""
        rows = self.rows(shard)
        return int(rows.stop - rows.start)

    def held_by(self, rank: int, size: int) -> slice:
        """The rows of the shards that ``rank`` of ``size`` workers computes."""
        held = ranges(self.num_shards, size)[rank]
        return slice(self.rows(held.lo).start, self.rows(held.hi).start)


def cut_into(num_rows: int, num_shards: int) -> Cut:
    """Cut ``num_rows`` into at most ``num_shards`` shards, each of at least two rows where possible.

    BatchNorm refuses a single one.
    """
    return Cut(num_rows, min(num_shards, max(1, num_rows // 2)))


def misses_rows(outputs: Sequence[Any], *, num_rows: int) -> str:
    """Say which of ``outputs`` has neither a row for each of ``num_rows`` nor a single value; empty if none is so."""
    for output in outputs:
        if not isinstance(output, Tensor | bool | int | float | str | None):
            return (
                f"an output of the model is a {type(output).__name__}, in which tensors cannot be found: return "
                "tensors, or tuples, lists and dicts of them, or register it with torch.utils._pytree"
            )
        if isinstance(output, Tensor) and output.dim() > 0 and len(output) != num_rows:
            return (
                f"an output of the model has the shape {tuple(output.shape)} for {num_rows} rows of a batch: its first "
                "dimension is not that of the batch, by which the outputs of shards could be joined"
            )
    return ""


def weight(cut: Cut, shard: int) -> float:
    """The share of the rows of a call that is in one shard."""
    return cut.size(shard) / cut.num_rows


def quick_digest(tensors: Sequence[Tensor | None]) -> str:
    """Return a cheap check of tensors on the CPU, by the beginning of each, to compare workers.

    Of a tensor of a batch as it was read, of which workers have read different parts, the shape alone.
    """
    crc = 0
    for tensor in tensors:
        shape = () if tensor is None else tensor.shape
        crc = crc32(repr(tuple(shape)).encode(), crc)
        if tensor is None or has_rows(tensor):
            continue
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            start = tensor.detach().reshape(-1)[:NUM_COMPARED]
            crc = crc32(tensor_bytes(start.resolve_conj().resolve_neg().contiguous()), crc)
    return f"{crc:x}"


def encode(rows: Mapping[int, Sequence[Tensor | None]]) -> bytes:
    """Encode tensors of shards, by the number of the shard."""
    heads, raw = [], []
    for shard, tensors in rows.items():
        heads.append(
            [shard, [each if each is None else [dtype_name(each.dtype), list(each.shape)] for each in tensors]]
        )
        raw += [tensor_bytes(each.detach().contiguous().cpu()) for each in tensors if each is not None]
    head = orjson.dumps(heads)
    return b"".join([len(head).to_bytes(4, "little"), head, *raw])


def decode(data: bytes, device: torch.device) -> dict[int, list[Tensor | None]]:
    """Decode what `encode` returned."""
    length = int.from_bytes(data[:4], "little")
    position = 4 + length
    rows: dict[int, list[Tensor | None]] = {}
    for shard, heads in orjson.loads(data[4:position]):
        rows[shard] = []
        for head in heads:
            if head is None:
                rows[shard].append(None)
                continue
            tensor = torch.empty(head[1], dtype=dtype_named(head[0]))
            if tensor.nbytes:
                memory = torch.frombuffer(bytearray(data[position : position + tensor.nbytes]), dtype=torch.uint8)
                byte_view(tensor).copy_(memory)
            position += tensor.nbytes
            rows[shard].append(tensor.to(device))
    return rows
