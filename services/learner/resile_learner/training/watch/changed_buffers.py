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
        self._begun = {self._memory(module, key): (module, key) for module, key in buffers}
        self._dependent: dict[int, Any] = {}
        """Storages, which are kept so that no other has their address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for module, key in self._buffers:  # replaced by assignment
            if self._memory(module, key) not in self._begun:
                self._note(module._buffers[key])
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

    def _memory(self, module: nn.Module, key: str) -> int:
        buffer = module._buffers[key]
        return 0 if buffer is None else int(buffer.untyped_storage()._cdata)

    def _is_dependent(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._dependent

    def _note(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            storage = tensor.untyped_storage()
            self._dependent[storage._cdata] = storage


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
