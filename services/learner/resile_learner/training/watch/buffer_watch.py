"""Refuses buffers of which the workers of a run would have different values, with no exchange to make them equal."""

from collections.abc import Iterator

import torch
from torch import nn

from resile_shared.errors import UsageError

from ...state.run import registered_buffers

Form = tuple[torch.Size, torch.dtype]


class BufferWatch:
    """Compares the buffers in a model's ``state_dict()`` with those at the training call.

    Those that came later, or have another shape or dtype, are not exchanged: see `Buffers`. Others, with
    ``persistent=False``, may be caches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._begun = dict(_forms(model))

    def check(self) -> None:
        """Raises UsageError when a buffer was created or replaced by one of another shape or dtype."""
        for name, form in _forms(self._model):
            begun = self._begun.get(name)
            if begun is None:
                raise UsageError(
                    f"the buffer {name} got a value after the training call began, and no worker would exchange it: "
                    "register it with its value in __init__ or, if it is a cache, with persistent=False"
                )
            if begun != form:
                raise UsageError(
                    f"the buffer {name} got another shape or dtype after the training call began "
                    f"({_describe(form)} instead of {_describe(begun)}), and no worker would exchange it: register it "
                    "with its final shape in __init__ or, if it is a cache, with persistent=False"
                )


def _forms(model: nn.Module) -> Iterator[tuple[str, Form]]:
    for name, module, key in registered_buffers(model):
        buffer = module._buffers[key]
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield name, (buffer.shape, buffer.dtype)


def _describe(form: Form) -> str:
    return f"{list(form[0])} {form[1]}"
