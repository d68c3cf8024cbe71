"""Clipping gradients in the body of an ordinary loop, where most batches leave none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.utils import clip_grad


@contextmanager
def clipping_without_gradients() -> Iterator[None]:
    """In this context ``clip_grad_value_`` does nothing if no parameter has a gradient, as ``clip_grad_norm_`` does.

    The function by which it groups gradients refuses an empty list. That function is replaced, because scripts may have
    imported ``clip_grad_value_`` itself by name.
    """
    module: Any = clip_grad
    original = module._group_tensors_by_device_and_dtype

    def group(tensors: list[list[Any]], with_indices: bool = False) -> Any:
        return original(tensors, with_indices) if tensors[0] else {}

    module._group_tensors_by_device_and_dtype = group
    try:
        yield
    finally:
        module._group_tensors_by_device_and_dtype = original
