"""Tensors as bytes to move and as arrays to add, without copies."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..state.memory import tensor_bytes

Array = Any
"""A flat numpy array or torch tensor: whichever adds its dtype faster. Slices of both share memory."""

_NUMPY_ADDS = frozenset(
    {torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8},
)


def array_of(tensor: Tensor) -> Array:
    """A view of a flat contiguous CPU tensor in which additions are fast."""
    return tensor.detach().numpy() if tensor.dtype in _NUMPY_ADDS else tensor.detach()


def maximizer(dtype: torch.dtype) -> Callable[..., object]:
    """``maximum(a, b, out=c)`` for the arrays of this dtype."""
    return np.maximum if dtype in _NUMPY_ADDS else torch.maximum


def adder(dtype: torch.dtype) -> Callable[..., object]:
    """``add(a, b, out=c)`` for the arrays of this dtype; numpy and torch give the same bits, those of one rounding."""
    return np.add if dtype in _NUMPY_ADDS else torch.add


class Bucket:
    """The memory of one bucket."""

    def __init__(self, partials: Sequence[Tensor], sums: Tensor, *, direct: bool, is_maximum: bool = False) -> None:
        self.dtype = sums.dtype
        self.add = (maximizer if is_maximum else adder)(sums.dtype)
        self.sums = array_of(sums)
        self.sums_bytes = tensor_bytes(sums)
        self.partials = [array_of(partial) for partial in partials]
        self.partials_bytes = [tensor_bytes(partial) for partial in partials]
        self.own_pieces = b"".join(self.partials_bytes) if direct else b""
        """Copy of the partials of a direct bucket: this rank may fold them before they are sent to all. Else empty."""
        self.in_place = bool(partials) and partials[0].data_ptr() == sums.data_ptr()


class Scratch:
    """Memory in which the pieces of others wait to be folded; kept from round to round."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._bytes = tensor_bytes(self._tensor)
        self._arrays: dict[torch.dtype, Array] = {}

    @property
    def num_bytes(self) -> int:
        """Size in bytes, the most that has been needed."""
        return len(self._bytes)

    def reserve(self, num_bytes: int) -> None:
        """Grow to at least ``num_bytes``."""
        if num_bytes > self.num_bytes:
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._bytes = tensor_bytes(self._tensor)
            self._arrays.clear()

    def bytes_at(self, offset: int, num_bytes: int) -> memoryview:
        """View a part of the memory as bytes, to receive into."""
        return self._bytes[offset : offset + num_bytes]

    def array_at(self, offset: int, num_elements: int, dtype: torch.dtype) -> Array:
        """View a part of the memory as an array, to add."""
        array = self._arrays.get(dtype)
        if array is None:
            whole = self._tensor[: len(self._bytes) // dtype.itemsize * dtype.itemsize]
            array = self._arrays[dtype] = array_of(whole.view(dtype))
        first = offset // dtype.itemsize
        return array[first : first + num_elements]
