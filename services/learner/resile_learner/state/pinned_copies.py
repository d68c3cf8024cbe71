"""Bytes of tensors on their way between devices and the host: through two pinned buffers, beside the compute.

While one buffer is sent, stored or received into, the device fills or empties the other. Tensors in memory of the host
are used as they are: nothing of them is copied, and no buffer is allocated for them.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..streams import SideStream


class Copied(Protocol):
    """Some copies that were started."""

    def synchronize(self) -> None:
        """Wait until they are done."""


class CopyStream(Protocol):
    """Copies between a device and buffers of the host; see `SideStream`."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a buffer."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Copied | None:
        """Start to copy, in the order of all calls; None if it is done already."""


StreamOf = Callable[[torch.device], CopyStream | None]
"""Makes the stream for a device; None for the host, whose tensors are used as they are."""
_Staged = dict[CopyStream, tuple[list[Tensor], list[Tensor]]]
"""For each stream: tensors on its device, and memory of a buffer for each of them."""


def side_stream(device: torch.device) -> CopyStream | None:
    """Make the stream on which tensors of ``device`` are copied."""
    return None if device.type == "cpu" else SideStream(device)


class _Buffer:
    """A pinned buffer, allocated when it is first used, and the copies that use it."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None
        self._used = 0
        self._copying: list[Copied] = []

    def take(self, num_bytes: int, stream: CopyStream) -> Tensor:
        """Return the next bytes."""
        if self._memory is None:
            self._memory = stream.allocate(self._num_bytes)
        self._used += num_bytes
        return self._memory[self._used - num_bytes : self._used]

    def copy(self, stream: CopyStream, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Start copies, one side of which is in this buffer."""
        copied = stream.copy(targets, sources)
        if copied is not None:
            self._copying.append(copied)

    def wait(self) -> None:
        """Wait until the copies are done."""
        while self._copying:
            self._copying.pop().synchronize()

    def reset(self) -> None:
        """Begin at the first byte again, once the copies are done."""
        self.wait()
        self._used = 0


class _PinnedBuffers:
    """Two buffers that take turns, each for one chunk of at most ``chunk_bytes``, and the stream of each device."""

    def __init__(self, chunk_bytes: int, stream_of: StreamOf) -> None:
        self._stream_of = stream_of
        self._streams: dict[torch.device, CopyStream | None] = {}
        self._buffer, self._other = _Buffer(chunk_bytes), _Buffer(chunk_bytes)

    def next(self) -> _Buffer:
        """Return the buffer whose turn it is, empty."""
        self._buffer, self._other = self._other, self._buffer
        self._buffer.reset()
        return self._buffer

    def wait(self) -> None:
        """Wait until no device uses a buffer."""
        self._buffer.wait()
        self._other.wait()

    def in_host_memory(self, chunk: Sequence[Tensor], buffer: _Buffer) -> tuple[list[Tensor], _Staged]:
        """Return memory of the host for each tensor, its own or of ``buffer``, and what has to be copied."""
        memory: list[Tensor] = []
        staged: _Staged = {}
        for tensor in chunk:
            stream = self._stream(tensor.device)
            if stream is None:
                memory.append(tensor)
                continue
            memory.append(buffer.take(len(tensor), stream))
            on_device, on_host = staged.setdefault(stream, ([], []))
            on_device.append(tensor)
            on_host.append(memory[-1])
        return memory, staged

    def _stream(self, device: torch.device) -> CopyStream | None:
        if device not in self._streams:
            self._streams[device] = self._stream_of(device)
        return self._streams[device]


class HostReader:
    """Reads tensors on any device, chunk by chunk. Tensors are 1-dim uint8, a chunk has at most ``chunk_bytes``."""

    def __init__(self, chunk_bytes: int, stream_of: StreamOf = side_stream) -> None:
        self._buffers = _PinnedBuffers(chunk_bytes, stream_of)

    def read(self, chunks: Iterable[Sequence[Tensor]]) -> Generator[list[Tensor], None, None]:
        """Return the tensors of each chunk, in memory of the host, with the values that the calling thread has queued.

        What is returned for a chunk may be used until the next one is requested: then its buffer is filled again. Close
        the iterator if it is not read to its end; after that no device reads the tensors any more.
        """
        try:
            before: tuple[list[Tensor], _Buffer] | None = None
            for chunk in chunks:
                following = self._start(chunk)
                if before is not None:
                    yield self._finish(before)
                before = following
            if before is not None:
                yield self._finish(before)
        finally:
            self._buffers.wait()

    def _start(self, chunk: Sequence[Tensor]) -> tuple[list[Tensor], _Buffer]:
        buffer = self._buffers.next()
        memory, staged = self._buffers.in_host_memory(chunk, buffer)
        for stream, (on_device, on_host) in staged.items():
            buffer.copy(stream, on_host, on_device)
        return memory, buffer

    def _finish(self, started: tuple[list[Tensor], _Buffer]) -> list[Tensor]:
        memory, buffer = started
        buffer.wait()
        return memory


class HostWriter:
    """Writes tensors on any device, chunk by chunk. Tensors are 1-dim uint8, a chunk has at most ``chunk_bytes``."""

    def __init__(self, chunk_bytes: int, stream_of: StreamOf = side_stream) -> None:
        self._buffers = _PinnedBuffers(chunk_bytes, stream_of)
        self._buffer: _Buffer | None = None
        self._staged: _Staged = {}

    def allocate(self, chunk: Sequence[Tensor]) -> list[Tensor]:
        """Return memory of the host to fill with the bytes of each tensor. `write` or another `allocate` follows."""
        self._buffer = self._buffers.next()
        memory, self._staged = self._buffers.in_host_memory(chunk, self._buffer)
        return memory

    def write(self) -> None:
        """Start to copy what is not in place yet: the memory is filled."""
        assert self._buffer is not None, "nothing was allocated"
        for stream, (on_device, on_host) in self._staged.items():
            self._buffer.copy(stream, on_device, on_host)
        self._staged = {}

    def finish(self) -> None:
        """Wait until all tensors have the bytes that were written."""
        self._buffers.wait()
