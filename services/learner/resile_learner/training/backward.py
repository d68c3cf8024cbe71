"""What ``loss.backward()`` does in the body of an ordinary loop."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from resile_shared.errors import UsageError

Backward = Callable[[Tensor], None]


@contextmanager
def handled_backward(handle: Callable[[Tensor, Backward], None]) -> Iterator[None]:
    """In this context ``loss.backward()`` calls ``handle(loss, run)``, where ``run`` is PyTorch's own backward pass.

    Hooks of parameters cannot do this: a shard's loss is weighted before its backward pass, and the exchange ends
    before the next line of the script, which may clip the gradients. ``Tensor.backward`` and
    ``torch.autograd.backward`` are handled alike; ``torch.autograd.grad`` is left alone.
    """
    original = torch.autograd.backward
    is_running = False

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        nonlocal is_running
        if is_running:  # by `handle` itself, or by a reentrant checkpoint
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        if any(argument is not None for argument in (grad_tensors, grad_variables, inputs)):
            raise UsageError(
                "backward() was called with gradients or inputs in a batch of a prepared loader: call it on the loss "
                "alone, and use torch.autograd.grad for gradients of anything else"
            )
        is_running = True
        try:
            handle(_only(tensors), lambda loss: original(loss, None, retain_graph, create_graph))
        finally:
            is_running = False

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def observed_backward(observe: Callable[[Tensor], None]) -> Iterator[None]:
    """In this context ``observe(loss)`` is called before the backward pass of a single value; all are as in PyTorch.

    Gradients of parameters alone, by `torch.autograd.grad` or ``inputs=``, do not reach through a divided call.
    """
    original, original_grad = torch.autograd.backward, torch.autograd.grad
    is_running = False

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_running
        is_outer, is_running = not is_running, True
        try:
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if is_outer and len(losses) == 1 and losses[0].numel() == 1:
                observe(losses[0])
            with _explaining_unused():
                original(losses, *args, **kwargs)
        finally:
            is_running = not is_outer

    def grad(*args: Any, **kwargs: Any) -> Any:
        with _explaining_unused():
            return original_grad(*args, **kwargs)

    torch.autograd.backward, torch.autograd.grad = backward, grad
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = original, original_grad


@contextmanager
def _explaining_unused() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise UsageError(
            "a gradient was asked for that does not reach through a prepared model, whose parameters get theirs by "
            "backward() alone: compute the call in full on each worker, as in `with resile.training.undivided(): "
            "loss = F.cross_entropy(model(inputs), targets)`"
        ) from error


def _only(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"torch.autograd.backward() was called with {len(tensors)} losses: call it with their sum")
    return tensors[0]
