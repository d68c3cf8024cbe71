"""Which calls of a model are divided: those that compute gradients, of a model whose rows are independent."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame
from torch.utils._pytree import tree_flatten

from ..gradients import Gradients
from ..module_attributes import restore_attributes, save_attributes
from .additivity import LIST_OF_SAMPLES, NO_ROWS, OTHER_PARAMETERS
from .call import Call, DividedCall, Repeat, Undividable
from .deferred import has_rows, values_of
from .exchanging import Exchanging
from .passes import Inputs
from .rows import cut_into

MAX_CHECKS = 16
"""In so many ways a model may be called, each of which is checked; counters make more."""
CHECKED_AGAIN = (1, 2, 4, 8, 16)
"""The iterations that look again whether rows are independent: samples of earlier batches may be alike."""
_PLAIN = (type(None), bool, int, float, str)


class KnownModels:
    """What is known of the models of a run by their calls so far, as a part of its state."""

    def __init__(self) -> None:
        self.checked: set[tuple[int, int]] = set()
        """Models, and digests of how they were called when their rows were found to be independent."""
        self.undivided: set[int] = set()
        """Those that every worker computes in full."""
        self.fixed: set[tuple[int, int, int]] = set()
        """Models, digests of the structure of a call, and numbers of its inputs that have no row for each sample.

        They are found where another batch is longer or shorter: a table may have as many rows as one batch.
        """
        self.sent_at_once: set[tuple[int, int]] = set()
        """Models and numbers of outputs that their scripts first use after the backward pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: sorted(known) for name, known in vars(self).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, known in state_dict.items():
            setattr(self, name, {tuple(each) if isinstance(each, list | tuple) else each for each in known})


class Division:
    """Divides the calls of ``model`` that compute gradients; other calls are computed in full by every worker."""

    def __init__(self, model: nn.Module, run: Exchanging, known: KnownModels, *, number: int) -> None:
        self.model = model
        self._number = number
        self.run = run
        self._known = known
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._modules: list[tuple[str, nn.Module]] = list(model.named_modules())
        self._own_parameters = [
            (module._parameters, name, own) for _, module in self._modules for name, own in module._parameters.items()
        ]
        """Where each parameter is in the model, and the parameter."""
        self.gradients = Gradients(self.parameters)
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes PyTorch ask for gradients of a call, whatever its inputs are."""
        self._forward: Callable[..., Any] = model.forward
        self._own = [module for _, module in self._modules if not _is_of_torch(type(module))]
        """The modules whose class is not PyTorch's own."""
        self._compiler: Any = None
        """What compiles the model, if the script has called ``torch.compile`` after `prepare`."""
        self._has_warned = self._has_noted_statistics = False
        """Whether calls with other parameters were named."""
        model.forward = _Forward(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of all rows, those of other workers' shards included."""
        leaves, spec = tree_flatten((args, kwargs))
        known = self._known
        is_asked = _is_undivided.get() or self._number in known.undivided
        structure = crc32(str(spec).encode())
        if is_asked or not torch.is_grad_enabled() or self._has_other_parameters():
            return self._compute(args, kwargs)
        num_rows = self._num_rows(leaves, structure)
        if num_rows == 0 or any(self._is_list_of_samples(each) for each in (*args, *kwargs.values())):
            self.compute_in_full(LIST_OF_SAMPLES if num_rows else NO_ROWS)
            return self._compute(args, kwargs)
        leaves = [values_of(leaf) if isinstance(leaf, Tensor) and not has_rows(leaf) else leaf for leaf in leaves]
        is_by_rows = [self._is_by_rows(number, leaf, num_rows, structure) for number, leaf in enumerate(leaves)]
        call = Call(self, Inputs(leaves, spec, is_by_rows), cut_into(num_rows, self.run.num_shards))
        key = self._key(leaves, structure)
        is_checked = self._is_checked(key)
        saved = {} if is_checked else save_attributes(self.model)
        try:
            if not is_checked and call.check(self._hooks()):
                known.checked.add(key)
            outputs = DividedCall.apply(call, self.anchor, *call.tensors)  # type: ignore[no-untyped-call]
        except Repeat:
            call.undo()
            return self.forward(*args, **kwargs)
        except Undividable as reason:
            call.undo()
            restore_attributes(saved)
            self.compute_in_full(str(reason))
            return self._compute(args, kwargs)
        return call.outputs(outputs)

    def _has_other_parameters(self) -> bool:
        """Whether the call is one with other parameters: they may share a graph, of which each shard would need a copy.

        They are gone before the backward pass, in which shards may be computed again.
        """
        if all(held.get(name) is own for held, name, own in self._own_parameters):
            return False
        if not self._has_warned:
            self._has_warned = True
            self.run.warn(OTHER_PARAMETERS)
        return True

    def _num_rows(self, leaves: Sequence[Any], structure: int) -> int:
        """The rows of a call: those of the batch, if an input has as many, else those of its first input; 0 if none."""
        known, num_samples = self._known.fixed, self.run.num_samples
        lengths = [
            len(leaf)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and (self._number, structure, number) not in known
        ]
        return num_samples if num_samples in lengths else next(iter(lengths), 0)

    def _is_by_rows(self, number: int, leaf: Any, num_rows: int, structure: int) -> bool:
        """Whether input ``number`` has a row for each row of the call, in this one as in those before."""
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return False
        if len(leaf) != num_rows:
            self._known.fixed.add((self._number, structure, number))
        return (self._number, structure, number) not in self._known.fixed

    def _key(self, leaves: Sequence[Any], structure: int) -> tuple[int, int]:
        """The number of the model, and how it is called: with which constants, modes, attributes and hooks."""
        constants = [leaf for leaf in leaves if isinstance(leaf, _PLAIN)]
        modes = [module.training for _, module in self._modules]
        attributes = [
            (name, value)
            for module in self._own
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN) and name != "training"
        ]
        return self._number, crc32(repr((structure, constants, modes, attributes, self._hooks())).encode())

    def _is_checked(self, key: tuple[int, int]) -> bool:
        """Whether the rows of calls of one kind were found to be independent; some iterations look again."""
        known = self._known.checked
        if key in known:
            return self.run.iteration not in CHECKED_AGAIN
        return sum(model == self._number for model, _ in known) >= MAX_CHECKS

    def _is_list_of_samples(self, value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value)
        return is_list and len(value) == self.run.num_samples > 1

    def _hooks(self) -> str:
        """The name of a layer with a hook that would see the rows of a part of the batch; PyTorch's own do not."""
        for name, module in self._modules:
            if name and (module._forward_hooks or module._forward_pre_hooks):
                hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
                if not all(map(_is_of_torch, hooks)):
                    return name
        return ""

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

    def note_statistics(self, look: Callable[[], str]) -> None:
        """Once: warn of what ``look`` says of statistics of the batch."""
        if self._has_noted_statistics:
            return
        self._has_noted_statistics = True
        if message := look():
            self.run.warn(message)

    def close(self) -> None:
        """Let the model compute all rows by itself again."""
        self.model.forward = self._forward

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Compute a shard. Other divided models that the model calls compute all rows of it."""
        with undivided(), torch.enable_grad():
            return self._compute(args, kwargs)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        if self._compiler is None:
            return self._forward(*args, **kwargs)
        from torch._dynamo.external_utils import wrap_inline  # a second, where nothing is compiled

        before = set_eval_frame(self._compiler)
        try:
            return wrap_inline(self._forward)(*args, **kwargs)
        finally:
            set_eval_frame(before)

    def call_uncompiled(self, args: Any, kwargs: Any) -> Any:
        """Call `forward`, of which nothing is compiled but the model."""
        before = set_eval_frame(None)
        outer, self._compiler = self._compiler, before
        try:
            return self.forward(*args, **kwargs)
        finally:
            self._compiler = outer
            set_eval_frame(before)


def _is_of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "torch"


class _Forward:
    """Replaces the ``forward`` of one model; a copy of that model has its own again."""

    def __init__(self, division: Division) -> None:
        self._division = division

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._division.call_uncompiled(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._division.model)]
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Store a model as one that computes all rows by itself."""
        return getattr, (self._division.model, "forward")


_Forward.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
for _function in (_Forward.__call__, Division.call_uncompiled):
    set_code_exec_strategy(_function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


@contextmanager
def undivided() -> Iterator[None]:
    """In this context each worker computes calls of prepared models in full, as for a gradient of a gradient."""
    token = _is_undivided.set(True)
    try:
        yield
    finally:
        _is_undivided.reset(token)


_is_undivided: ContextVar[bool] = ContextVar("resile_is_undivided", default=False)
