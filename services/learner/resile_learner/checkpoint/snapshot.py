"""A state copied to memory at a boundary, so that training continues while it is uploaded."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from ..state.flat import FlatState
from ..state.memory import ByteStream, byte_view, tensor_bytes
from ..state.pinned_copies import HostReader, StreamOf, side_stream

PART_BYTES = 32 * 2**20
_CHUNK_BYTES = 8 * 2**20
"""Bytes that a device copies while the previous ones are copied from their pinned buffer."""


class Snapshot:
    """The bytes of a state as they were when it was made: part 0 is the skeleton, the others the tensors.

    The tensors are cut into parts of ``part_bytes``, of which the last may be smaller. Members that hold the same state
    make the same parts. Where parts of a state may differ (see `RunState`), only the skeletons do.
    """

    def __init__(
        self,
        flat: FlatState,
        *,
        part_bytes: int = PART_BYTES,
        reuse: "Snapshot | None" = None,
        stream_of: StreamOf = side_stream,
    ) -> None:
        """Copy ``flat``, into the memory of ``reuse`` if that is free and has tensors of the same kinds.

        ``stream_of`` makes the stream on which the tensors of a device are copied.
        """
        self.skeleton = flat.skeleton
        self.part_bytes = part_bytes
        self.free = False
        memory = reuse._give_up_memory(flat.tensors) if reuse else None
        self._tensors = memory or [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in flat.tensors]
        _copy(flat.tensors, self._tensors, stream_of)
        self._stream = ByteStream(map(tensor_bytes, self._tensors))
        self.num_bytes = len(self.skeleton) + self._stream.num_bytes
        """Size of all parts together, in bytes."""

    @property
    def num_parts(self) -> int:
        """How many parts there are; at least one."""
        return 1 - (-self._stream.num_bytes // self.part_bytes)

    def part(self, number: int) -> list[memoryview]:
        """View the bytes of one part without copying them."""
        assert not self.free, "a snapshot was read after its release"
        if number == 0:
            return [memoryview(self.skeleton)]
        return self._stream.cut((number - 1) * self.part_bytes, number * self.part_bytes)

    def release(self) -> None:
        """Allow the next snapshot to reuse this one's memory; it must not be read any more."""
        self.free = True

    def _give_up_memory(self, sources: list[Tensor]) -> list[Tensor] | None:
        if not self.free or [_kind(tensor) for tensor in self._tensors] != [_kind(source) for source in sources]:
            return None
        tensors, self._tensors = self._tensors, []
        self._stream = ByteStream[memoryview]([])
        return tensors


def sha256(buffers: Iterable[memoryview]) -> str:
    """Compute the sha256, in hex, of buffers back to back."""
    sha = hashlib.sha256()
    for buffer in buffers:
        sha.update(buffer)
    return sha.hexdigest()


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _copy(sources: list[Tensor], targets: list[Tensor], stream_of: StreamOf) -> None:
    """Copy tensors in memory of the host at once, and those on devices chunk by chunk through pinned buffers."""
    streams = {device: stream_of(device) for device in {source.device for source in sources}}
    on_devices: list[tuple[Tensor, Tensor]] = []
    for source, target in zip(sources, targets, strict=True):
        if streams[source.device] is None:
            target.copy_(source)
        else:
            on_devices.append((byte_view(source), byte_view(target)))
    if on_devices:
        read, written = (ByteStream[Tensor](views) for views in zip(*on_devices, strict=True))
        starts = range(0, read.num_bytes, _CHUNK_BYTES)
        chunks = (read.cut(start, start + _CHUNK_BYTES) for start in starts)
        for start, chunk in zip(starts, HostReader(_CHUNK_BYTES, streams.__getitem__).read(chunks), strict=True):
            for target, piece in zip(written.cut(start, start + _CHUNK_BYTES), chunk, strict=True):
                target.copy_(piece)
