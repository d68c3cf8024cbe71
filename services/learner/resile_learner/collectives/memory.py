"""Tensors as bytes and as arrays that can be added, without copies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any
"""A flat numpy array or torch tensor: whichever adds its dtype faster. Slices of both share memory."""

_NUMPY_ADDS = frozenset(
    {torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8},
)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype and shape."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def is_flat_memory(tensor: Tensor) -> bool:
    """Whether the elements lie in CPU memory one after the other, as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_copy(tensor: Tensor) -> Tensor:
    """The same elements in contiguous CPU memory."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def array_of(tensor: Tensor) -> Array:
    """A view of a flat contiguous CPU tensor in which additions are fast."""
    return tensor.detach().numpy() if tensor.dtype in _NUMPY_ADDS else tensor.detach()


def adder(dtype: torch.dtype) -> Callable[..., object]:
    """``add(a, b, out=c)`` for the arrays of this dtype; numpy and torch give the same bits, those of one rounding."""
    return np.add if dtype in _NUMPY_ADDS else torch.add
