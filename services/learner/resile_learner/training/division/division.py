"""Which calls of a model are divided: those that compute gradients, of a model whose rows are independent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..gradients import Gradients
from .additivity import restore_attributes, save_attributes
from .call import Call, DividedCall, Undividable
from .deferred import has_rows, values_of
from .exchanging import Exchanging
from .rows import check_rows, cut_into


class UndividedModels:
    """The models that every worker computes in full, and those that were called, as a part of the run's state."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.called: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the models."""
        return {"numbers": sorted(self.numbers), "called": sorted(self.called)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.numbers, self.called = set(state_dict["numbers"]), set(state_dict["called"])


class Division:
    """Divides the calls of ``model`` that compute gradients; other calls are computed in full by every worker."""

    def __init__(self, model: nn.Module, run: Exchanging, undivided: UndividedModels, *, number: int) -> None:
        self.model = model
        self._number = number
        self.run = run
        self._undivided = undivided
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients = Gradients(self.parameters)
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes PyTorch ask for gradients of a call, whatever its inputs are."""
        self._forward: Callable[..., Any] = model.forward
        self._is_in_shard = False
        model.forward = _Forward(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of all rows, those of other workers' shards included."""
        leaves, spec = tree_flatten((args, kwargs))
        num_rows = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)
        undivided = self._undivided
        is_asked = _is_undivided.get() or self._number in undivided.numbers
        if self._is_in_shard or is_asked or not torch.is_grad_enabled() or num_rows == 0:
            return self._forward(*args, **kwargs)
        leaves = [values_of(leaf) if isinstance(leaf, Tensor) and not has_rows(leaf) else leaf for leaf in leaves]
        check_rows([leaf for leaf in leaves if isinstance(leaf, Tensor)], num_samples=self.run.num_samples)
        call = Call(self, leaves, spec, cut_into(num_rows, self.run.num_shards))
        is_first = self._number not in undivided.called
        saved = save_attributes(self.model) if is_first else {}
        undivided.called.add(self._number)
        try:
            if is_first:
                call.check()
            *outputs, link = DividedCall.apply(call, self.anchor, *call.tensors)  # type: ignore[no-untyped-call]
        except Undividable as reason:
            self.run.warn(str(reason))
            call.undo()
            restore_attributes(saved)
            undivided.numbers.add(self._number)
            return self._forward(*args, **kwargs)
        return call.outputs(outputs, link)

    def close(self) -> None:
        """Let the model compute all rows by itself again."""
        self.model.forward = self._forward

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Compute a shard."""
        self._is_in_shard = True
        try:
            with torch.enable_grad():
                return self._forward(*args, **kwargs)
        finally:
            self._is_in_shard = False


class _Forward:
    """Replaces the ``forward`` of one model; a copy of that model has its own again."""

    def __init__(self, division: Division) -> None:
        self._division = division

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._division.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._division.model)]
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Store a model as one that computes all rows by itself."""
        return getattr, (self._division.model, "forward")


@contextmanager
def undivided() -> Iterator[None]:
    """In this context each worker computes calls of prepared models in full, as for a gradient of a gradient."""
    token = _is_undivided.set(True)
    try:
        yield
    finally:
        _is_undivided.reset(token)


_is_undivided: ContextVar[bool] = ContextVar("resile_is_undivided", default=False)
