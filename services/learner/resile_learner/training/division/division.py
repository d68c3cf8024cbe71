"""Which calls of a model are divided: those that compute gradients, of a model whose rows are independent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..gradients import Gradients
from .additivity import LIST_OF_SAMPLES, restore_attributes, save_attributes
from .call import Call, DividedCall, Repeat, Undividable
from .deferred import has_rows, values_of
from .exchanging import Exchanging
from .rows import check_rows, cut_into


class KnownModels:
    """What is known of the models of a run by their calls so far, as a part of its state."""

    def __init__(self) -> None:
        self.called: set[int] = set()
        self.undivided: set[int] = set()
        """Those that every worker computes in full."""
        self.sent_at_once: set[tuple[int, int]] = set()
        """Models and numbers of outputs that their scripts first use after the backward pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: sorted(known) for name, known in vars(self).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.called, self.undivided = set(state_dict["called"]), set(state_dict["undivided"])
        self.sent_at_once = {(model, output) for model, output in state_dict["sent_at_once"]}


class Division:
    """Divides the calls of ``model`` that compute gradients; other calls are computed in full by every worker."""

    def __init__(self, model: nn.Module, run: Exchanging, known: KnownModels, *, number: int) -> None:
        self.model = model
        self._number = number
        self.run = run
        self._known = known
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
        known = self._known
        is_asked = _is_undivided.get() or self._number in known.undivided
        if self._is_in_shard or is_asked or not torch.is_grad_enabled() or num_rows == 0:
            return self._forward(*args, **kwargs)
        if any(self._is_list_of_samples(each) for each in (*args, *kwargs.values())):
            self.compute_in_full(LIST_OF_SAMPLES)
            return self._forward(*args, **kwargs)
        leaves = [values_of(leaf) if isinstance(leaf, Tensor) and not has_rows(leaf) else leaf for leaf in leaves]
        check_rows([leaf for leaf in leaves if isinstance(leaf, Tensor)], num_samples=self.run.num_samples)
        call = Call(self, leaves, spec, cut_into(num_rows, self.run.num_shards))
        is_first = self._number not in known.called
        saved = save_attributes(self.model) if is_first else {}
        known.called.add(self._number)
        try:
            if is_first:
                self._warn_of_hooks()
                call.check()
            outputs = DividedCall.apply(call, self.anchor, *call.tensors)  # type: ignore[no-untyped-call]
        except Repeat:
            call.undo()
            return self.forward(*args, **kwargs)
        except Undividable as reason:
            call.undo()
            restore_attributes(saved)
            self.compute_in_full(str(reason))
            return self._forward(*args, **kwargs)
        return call.outputs(outputs)

    def _is_list_of_samples(self, value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value)
        return is_list and len(value) == self.run.num_samples > 1

    def _warn_of_hooks(self) -> None:
        """Tell of hooks of modules that see the rows of a part of the batch, except for those of PyTorch itself."""
        for name, module in self.model.named_modules():
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if name and not all(map(_is_of_torch, hooks)):
                self.run.warn(
                    f"the layer {name} of the model has a hook, which is called for each part of a batch, with the "
                    "rows of that part: what it counts or collects is not that of the batch, and differs by worker"
                )
                return

    @property
    def sent_at_once(self) -> set[int]:
        """The numbers of the outputs that are sent with each call, whatever their size."""
        return {output for model, output in self._known.sent_at_once if model == self._number}

    def send_at_once(self, number: int) -> None:
        """Send output ``number`` with each call from now on."""
        self._known.sent_at_once.add((self._number, number))

    def compute_in_full(self, reason: str) -> None:
        """Compute calls in full on each worker from now on."""
        if self._number not in self._known.undivided:
            self._known.undivided.add(self._number)
            self.run.warn(reason)

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


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"


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
