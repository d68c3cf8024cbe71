"""A script's own training step: it computes a loss and calls ``backward()``, and does not step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resile.training import Iteration
from resile.training.extend import Backward, handled_backward
from resile_shared.errors import UsageError

_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


class WrappedModel:
    """The model that is passed to a script's own step and test."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_function: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss_function = loss_function

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """Compute the model's outputs."""
        return self._model(*inputs, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self._optimizer

    def get_loss_function(self) -> Any:
        """Return the loss function."""
        return self._loss_function


class OwnStep:
    """Calls the script's own step for each shard. Raises UsageError if the step does something that is refused."""

    def __init__(
        self,
        function: Callable[..., Any],
        model: WrappedModel,
        evaluate: Callable[[Any, Any], float],
        loader: Any,
        arguments: Any,
    ) -> None:
        self._function = function
        self._model = model
        self._evaluate = evaluate
        self._loader = loader
        self._arguments = arguments

    def __call__(self, iteration: Iteration, batch: Any, more: Mapping[str, float]) -> Mapping[str, Any]:
        """Compute one shard; returns its loss and accuracy. ``more`` are further scalars of it.

        The backward pass follows the script's step, which alone knows the accuracy.
        """
        found: list[tuple[Tensor, Backward]] = []
        with handled_backward(lambda loss, run: found.append((loss, run))), _no_clipping():
            returned = self._function(self._model, batch, self._evaluate, self._loader, self._arguments)
        if len(found) != 1:
            raise UsageError(
                f"fn_step_train called backward() {len(found)} times: call it once, with the sum of all losses"
            )
        if not (isinstance(returned, tuple | list) and len(returned) == 2):
            raise UsageError("fn_step_train has to return two things: the accuracy and the loss")
        loss, run = found[0]
        scores: dict[str, Any] = {"loss": loss.detach(), "accuracy": float(returned[0])}
        iteration.compute(loss, run, {**scores, **more}, allows_nan=False)
        return scores


def moved(value: Any, device: torch.device) -> Any:
    """Return ``value``, a tensor or several in lists, tuples and dicts, on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: moved(part, device) for name, part in value.items()}
    return type(value)(moved(part, device) for part in value) if type(value) in (list, tuple) else value


@contextmanager
def _no_clipping() -> Iterator[None]:
    """Refuse to clip gradients in the step: they do not exist yet, and would be those of one engine only."""

    def refuse(*arguments: Any, **more: Any) -> None:
        raise UsageError(
            "fn_step_train clips gradients, which are exchanged after it: leave it out, or use resile.training.prepare"
        )

    originals = {name: getattr(nn.utils, name) for name in _CLIPPING}
    for name in originals:
        setattr(nn.utils, name, refuse)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.utils, name, original)
