"""Follows what an operation computes from buffers that a model has changed in the same call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHAPE_ALONE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_")
"""Operations that use no values of what they are given."""


class ChangedBuffers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this context, notes the memory that depends on changed buffers; they are named by module and key."""

    def __init__(self, buffers: Sequence[tuple[nn.Module, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers
        present = [buffer for module, key in buffers if (buffer := module._buffers[key]) is not None]
        self._begun = {storage._cdata: storage for storage in (buffer.untyped_storage() for buffer in present)}
        """The storages of the buffers as they were, which are kept so that no other has their address."""
        self._dependent: dict[int, Any] = {}
        """Storages that depend on changed buffers, which are kept, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for module, key in self._buffers:  # replaced by assignment
            buffer = module._buffers[key]
            if buffer is not None and buffer.untyped_storage()._cdata not in self._begun:
                self._note(buffer)
        given = _tensors((args, kwargs))
        name = func.__name__
        depends = not name.startswith(_SHAPE_ALONE) and any(map(self._is_dependent, given))
        written = [
            value
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
        ]
        result = func(*args, **kwargs)
        for each in written:
            if depends or each.untyped_storage()._cdata in self._begun:
                self._note(each)
        if depends:
            for each in _tensors(result):
                self._note(each)
        return result

    def reached(self, outputs: Sequence[Tensor]) -> bool:
        """Whether one of ``outputs`` depends on a changed buffer."""
        return any(map(self._is_dependent, outputs))

    def _is_dependent(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._dependent

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._dependent[storage._cdata] = storage


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
