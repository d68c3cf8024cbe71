"""Tensors as bytes: their order in memory, their bytes without copies, and many of them as one stream."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import Generic, TypeVar

import torch
from torch import Tensor

from resile_shared.errors import UsageError

Buffer = TypeVar("Buffer", memoryview, Tensor)  # a tensor is 1-dim and uint8


class StateError(UsageError):
    """A state cannot be stored, or what is read is not a stored state."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor of any dtype as writable bytes, without a copy.

    The view keeps the memory alive. Raises StateError for a tensor that is elsewhere or has gaps.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise StateError(
            f"the bytes of a tensor can be viewed only if it is contiguous and on the CPU, not {describe(tensor)}"
        )
    return byte_view(tensor).numpy().data


def byte_view(tensor: Tensor) -> Tensor:
    """View the memory of a contiguous tensor of any dtype and device as 1-dim uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def joined_bytes(tensors: Iterable[Tensor]) -> bytes:
    """Copy the bytes of ``tensors``, one after the other. Those on a device are joined there: it is waited for once."""
    groups = groupby(tensors, key=lambda tensor: tensor.device)
    joined = [torch.cat([byte_view(tensor.contiguous()) for tensor in group]) for _, group in groups]
    return b"".join(tensor_bytes(tensor.cpu()) for tensor in joined)


class ByteStream(Generic[Buffer]):
    """Buffers of bytes back to back, seen as one stream without joining them."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._buffers: list[Buffer] = [buffer for buffer in buffers if len(buffer)]
        self._ends = list(accumulate(len(buffer) for buffer in self._buffers))
        self.num_bytes = self._ends[-1] if self._ends else 0

    def cut(self, start: int, stop: int) -> list[Buffer]:
        """View bytes ``start`` to ``stop``, in order; those beyond the end are left out."""
        stop = min(stop, self.num_bytes)
        if start >= stop:
            return []
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, stop)
        views = self._buffers[first : last + 1]
        # From the back: first and last may be the same buffer.
        views[-1] = views[-1][: len(views[-1]) - (self._ends[last] - stop)]
        views[0] = views[0][len(self._buffers[first]) - (self._ends[first] - start) :]
        return views


def in_memory_order(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the order of dimensions in memory, () for the natural one, and the tensor in that order, contiguous.

    A tensor with gaps or repeats is copied. Keeping the order (channels_last) matters: elementwise kernels may take
    another path, with other rounding, when the layouts of a parameter and of its optimizer state differ.
    """
    if tensor.is_contiguous():
        return (), tensor
    dims = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    permuted = tensor.permute(dims)
    return (dims, permuted) if permuted.is_contiguous() else ((), tensor.contiguous())


def is_expanded(tensor: Tensor) -> bool:
    """Whether one element of memory stands for several of ``tensor``, so that it cannot be written as a whole."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """``torch.float32`` for ``float32``. Raises StateError when this PyTorch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"the stored state is not readable: this PyTorch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def describe(tensor: Tensor) -> str:
    """Name the type, dtype, layout and device of a tensor, for an error message."""
    gaps = "" if tensor.layout != torch.strided or tensor.is_contiguous() else ", not contiguous"
    return f"a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}{gaps}"
