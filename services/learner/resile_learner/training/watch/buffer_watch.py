"""Refuses buffers that would differ between the workers of a run, with no exchange to make them equal."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from resile_shared.errors import UsageError

from ...state.modules import ModuleTree

Form = tuple[torch.Size, torch.dtype]


class BufferWatch:
    """Compares the buffers of a model with those at the training call.

    Buffers that came later, or have another shape or dtype, are not exchanged: see `Buffers`. With ``persistent=False``
    they may be caches, whose content must not change while the shape stays the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = ModuleTree(model)
        self._begun = {name: _form(buffer) for name, buffer, _ in _buffers(self._modules)}
        self._caches: dict[str, Tensor] = {}

    def check(self, *, compares_caches: bool) -> None:
        """Raises UsageError when a buffer was created or got another shape or dtype, and is not a cache."""
        for name, buffer, is_persistent in _buffers(self._modules):
            form, begun = _form(buffer), self._begun.get(name)
            if form == begun:
                continue
            if not is_persistent:
                if compares_caches:
                    self._check_cache(name, buffer)
            elif begun is None and name.endswith("_mask") and _is_pruned(dict(self._modules.named()), name):
                layer, _, mask = name.rpartition(".")
                raise UsageError(
                    f"the layer {layer} was pruned after the training call began, and no worker would exchange its "
                    f"mask: call `torch.nn.utils.prune.identity(layer, {mask.removesuffix('_mask')!r})` before the "
                    "training call, and prune later as before"
                )
            elif begun is None:
                raise UsageError(
                    f"the buffer {name} got a value after the training call began, and no worker would exchange it: "
                    "register it with its value in __init__ or, if it is a cache, with persistent=False"
                )
            else:
                raise UsageError(
                    f"the buffer {name} got another shape or dtype after the training call began "
                    f"({_describe(form)} instead of {_describe(begun)}), and no worker would exchange it: register it "
                    "with its final shape in __init__ or, if it is a cache, with persistent=False"
                )

    def _check_cache(self, name: str, buffer: Tensor) -> None:
        known = self._caches.get(name)
        if known is not None and _form(known) == _form(buffer) and _differs(known, buffer):
            raise UsageError(
                f"the buffer {name} got a value after the training call began that changes with the batches, so that "
                "each worker would have another one: register it with its value in __init__, which makes the workers "
                "exchange it, and keep what is computed anew for each batch in no buffer"
            )
        self._caches[name] = buffer.detach().clone()


def _is_pruned(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether the buffer ``name`` is the mask of ``torch.nn.utils.prune``, which renames the parameter beside it."""
    layer, _, mask = name.rpartition(".")
    return mask.removesuffix("_mask") + "_orig" in modules[layer]._parameters


def _buffers(modules: ModuleTree) -> Iterator[tuple[str, Tensor, bool]]:
    """The name of each buffer that has a value, the buffer, and whether it is in the ``state_dict()``."""
    for path, module in modules.named():
        if module._buffers:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{key}" if path else key, buffer, key not in module._non_persistent_buffers_set


def _form(buffer: Tensor) -> Form:
    return buffer.shape, buffer.dtype


def _differs(known: Tensor, buffer: Tensor) -> bool:
    are_nan = (known != known) & (buffer != buffer)
    return bool(((known != buffer) & ~are_nan).any())


def _describe(form: Form) -> str:
    return f"{list(form[0])} {form[1]}"
