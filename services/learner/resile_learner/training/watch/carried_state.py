"""State that a loop carries from batch to batch, such as the hidden state of a recurrent network."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resile_shared.errors import UsageError

_MOST_BYTES = 16 << 20
"""A larger output is not kept for comparison: it is not a hidden state."""


class CarriedState(UsageError):
    """The model was given an output of an earlier batch."""

    def __init__(self) -> None:
        super().__init__(
            "the model was given an output of an earlier batch (a hidden state that is carried on, as in truncated "
            "back-propagation through time): a worker computes only some of the batches, so it has no such state. "
            "Start each batch with a fresh hidden state, and make each sample as long as the network should remember"
        )


class CarriedStateWatch:
    """Recognises outputs of a model among its inputs in later shards, by their memory."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._earlier: list[Any] = []
        self._found: CarriedState | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the calls of the model while a shard is computed. They raise CarriedState, and so does the exit."""
        outputs: list[Any] = []
        earlier = {storage.data_ptr() for storage in self._earlier}

        def on_call(module: nn.Module, args: Any, kwargs: Any) -> None:
            if any(tensor.untyped_storage().data_ptr() in earlier for tensor in _tensors((args, kwargs))):
                self._found = CarriedState()
                raise self._found

        def on_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            storages = [tensor.untyped_storage() for tensor in _tensors(output)]
            outputs.extend(s for s in storages if 0 < s.nbytes() <= _MOST_BYTES and s.data_ptr() not in given)

        handles = [model.register_forward_pre_hook(on_call, with_kwargs=True) for model in self._models]
        handles += [model.register_forward_hook(on_output, with_kwargs=True) for model in self._models]
        try:
            yield
            if self._found:  # the script has caught it
                raise self._found
        finally:
            for handle in handles:
                handle.remove()
            self._earlier = outputs  # alive, so that its memory is not another tensor's

    def stop(self) -> None:
        """Forget the outputs of the last shard."""
        self._earlier = []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided and value.device.type != "meta":
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
