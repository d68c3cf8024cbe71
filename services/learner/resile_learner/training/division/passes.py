"""The forward and backward passes of a call's shards on one worker, whichever of them it holds."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from resile_shared.errors import UsageError

from ..loss_weights import forget_weight, note_weight
from ..seeds import mix, seed_all
from .deferred import Deferred, is_deferred, rows_of, values_of
from .exchanging import Divided
from .rows import MAX_SENT_BYTES, Cut, misses_rows

Gradients = Sequence[Tensor | None]
"""Those of the outputs that are tensors, of all rows."""


class Inputs(NamedTuple):
    """The inputs of a call."""

    leaves: Sequence[Any]
    spec: TreeSpec
    """Their structure."""
    is_by_rows: Sequence[bool]
    """Whether each has a row for each row of the call."""


class Output(NamedTuple):
    """What all shards know of an output."""

    is_single: bool
    shape: tuple[int, ...]
    """[all rows, ...]"""
    dtype: torch.dtype
    device: torch.device
    is_differentiable: bool
    is_late: bool
    """Whether it is sent only when the body uses it."""

    @property
    def num_bytes(self) -> int:
        """The size of all rows."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Shard:
    """What the forward pass of a shard has left: its inputs, and its outputs with their graph, those that are tensors.

    ``inputs`` that want a gradient are leaves of that graph.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]


class Passes:
    """Computes shards of one call of ``model``, cut from its ``inputs``.

    ``share(number, shard)`` is by how much a shard counts in an output that is a single value. Outputs with the numbers
    ``sent_at_once`` are never late.
    """

    def __init__(
        self,
        model: Divided,
        inputs: Inputs,
        cut: Cut,
        *,
        seed: int,
        share: Callable[[int, int], float],
        sent_at_once: Container[int],
    ) -> None:
        tensors = [(leaf, by_rows) for leaf, by_rows in zip(*inputs[::2], strict=True) if isinstance(leaf, Tensor)]
        self.tensors = [leaf for leaf, _ in tensors]
        """The inputs that are tensors."""
        self.is_by_rows = [by_rows for _, by_rows in tensors]
        """Whether each of them has a row for each row of the call."""
        self.wants_gradient = [not is_deferred(each) and each.requires_grad for each in self.tensors]
        self.changes_inputs = False
        """Whether the model changes its inputs in place."""
        self.outputs: list[Output] = []
        """Those outputs that are tensors."""
        self._model = model
        self._run = model.run
        self._inputs = inputs
        self._cut = cut
        self._seed = seed
        self._share = share
        self._sent_at_once = sent_at_once
        self._buffers_before = model.run.buffers.committed()
        self._versions = [each._version for each in model.parameters]
        self._input_versions = [_version(each) for each in self.tensors]
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in {"cpu", *(each.device.type for each in self.tensors)}
            if torch.is_autocast_enabled(device)
        ]
        self._structure: TreeSpec | None = None
        """That of the outputs."""
        self._constants: list[Any] = []
        """The outputs, but for tensors."""
        self._kept: dict[int, Shard] = {}
        """From the forward to the backward pass."""
        self._left: dict[int, dict[int, Tensor]] = {}
        """The late outputs of each shard, by their numbers, after the backward pass."""

    @property
    def constants(self) -> list[Any]:
        """The outputs that are no tensors."""
        return [each for each in self._constants if each is not _TENSOR]

    def structured(self, tensors: Sequence[Tensor]) -> Any:
        """Return the outputs with their structure."""
        assert self._structure is not None
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if it is _TENSOR else it for it in self._constants], self._structure)

    def forget(self) -> None:
        """All shards are computed anew."""
        self._kept.clear()

    def undo(self) -> None:
        """Undo what the call has changed."""
        self._run.buffers.reset(self._buffers_before)

    def forward(self, shard: int) -> Shard:
        """Compute a shard for the first time."""
        computed = self._kept[shard] = self._compute(shard)
        return computed

    def computed(self, shard: int) -> Shard:
        """Return a shard with its graph, computed again if another worker held it, or if the graph is gone."""
        if shard in self._kept:
            return self._kept[shard]
        if [each._version for each in self._model.parameters] != self._versions:
            raise UsageError(
                "parameters of the model were changed after a call and before its backward pass, for which it is "
                "computed again: step the optimizer after backward()"
            )
        buffers = self._run.buffers
        now = buffers.committed()
        buffers.reset(self._buffers_before)
        computed = self._compute(shard)
        buffers.reset(now)
        if not self._run.recomputes:
            self._kept[shard] = computed
        return computed

    def late(self, shard: int, number: int, *, is_over: bool) -> Tensor | None:
        """Return a late output of a shard.

        When it ``is_over``, so that it cannot be computed again: None if this worker has not computed it.
        """
        if shard in self._left:
            return self._left[shard][number]
        if is_over and shard not in self._kept:
            return None
        return self.computed(shard).outputs[number].detach()

    def check_inputs(self) -> None:
        """Raise UsageError if inputs were changed in place since the call, which may be computed again."""
        for before, tensor in zip(self._input_versions, self.tensors, strict=True):
            if _version(tensor) != before:
                raise UsageError(
                    "an input of the model was changed in place after the call and before its backward pass, which "
                    "needs it as it was: change a copy, as in `x = x + 1` instead of `x += 1`"
                )

    def drop(self, shard: int) -> None:
        """Free the graph of a shard."""
        self._kept.pop(shard, None)

    def of_rows(self, rows: slice, *, shard: int) -> list[Any]:
        """Return the outputs of ``rows``, computed as ``shard``."""
        return self._compute_rows(rows, shard)[1]

    def _compute(self, shard: int) -> Shard:
        inputs, outputs = self._compute_rows(self._cut.rows(shard), shard)
        if message := misses_rows(outputs, num_rows=self._cut.size(shard)):
            raise UsageError(message)
        before, self._constants = self._constants, [_TENSOR if isinstance(each, Tensor) else each for each in outputs]
        if before not in ([], self._constants):
            other = [each for each in before if each is not _TENSOR]
            raise UsageError(
                f"the model returned {self.constants} for one part of a batch and {other} for another, which has no "
                "mean: return numbers as tensors, as in loss.detach() instead of loss.item()"
            )
        self.outputs = [self._known(number, each) for number, each in enumerate(_tensors(outputs))]
        return Shard(_tensors(inputs), _tensors(outputs))

    def _known(self, number: int, output: Tensor) -> Output:
        shape = (self._cut.num_rows, *output.shape[1:]) if output.dim() else ()
        is_large = prod(shape) * output.dtype.itemsize > MAX_SENT_BYTES
        is_late = bool(output.dim()) and is_large and number not in self._sent_at_once
        return Output(not output.dim(), shape, output.dtype, output.device, output.requires_grad, is_late)

    def _compute_rows(self, rows: slice, shard: int) -> tuple[list[Any], list[Any]]:
        """Return the inputs of ``rows``, and their outputs, without structure."""
        self._run.buffers.restore()
        inputs = [self._part(leaf, rows if by_rows else None) for leaf, by_rows in zip(*self._inputs[::2], strict=True)]
        args, kwargs = tree_unflatten(inputs, self._inputs.spec)
        seed_all(mix(self._seed, shard))
        forget_weight()
        with ExitStack() as stack:
            stack.enter_context(self._run.computing())
            stack.enter_context(_explained_memory())
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            outputs, self._structure = tree_flatten(self._model.compute(args, kwargs))
        note_weight(_tensors(outputs))
        self.changes_inputs = self.changes_inputs or any(each._version for each in _tensors(inputs))
        return inputs, outputs

    def _part(self, leaf: Any, rows: slice | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        part = values_of(leaf) if rows is None else rows_of(leaf, rows)
        # A copy, which may be changed, and begins where all memory of PyTorch does: kernels may depend on that.
        return part.detach().clone().requires_grad_(not is_deferred(leaf) and leaf.requires_grad)

    def backward(self, shard: int, computed: Shard, gradients: Gradients) -> list[Tensor]:
        """Run the backward pass of a shard; return the gradients of its inputs, as `input_gradients` does."""
        self.drop(shard)
        known = zip(self.outputs, computed.outputs, strict=True)
        self._left[shard] = {number: each.detach() for number, (it, each) in enumerate(known) if it.is_late}
        outputs, of_outputs = self._differentiated(shard, computed, gradients)
        if outputs:
            with self._run.computing_gradients(outputs), _explained_memory():
                torch.autograd.backward(outputs, of_outputs)
        return _dense([(each, each.grad) for each in computed.inputs if each.requires_grad])

    def input_gradients(self, shard: int, gradients: Gradients) -> list[Tensor]:
        """Return the gradients of the inputs that want one, zero where there is none, and behind them which are given.

        Those of parameters stay as they are.
        """
        computed = self.computed(shard)
        self.drop(shard)
        outputs, of_outputs = self._differentiated(shard, computed, gradients)
        inputs = [each for each in computed.inputs if each.requires_grad]
        found: Gradients = [None] * len(inputs)
        if outputs:
            with self._run.computing_gradients(outputs), _explained_memory():
                found = torch.autograd.grad(outputs, inputs, of_outputs, allow_unused=True)
        return _dense(list(zip(inputs, found, strict=True)))

    def _differentiated(self, shard: int, computed: Shard, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        """Return those outputs of a shard that have a gradient, and the gradients."""
        outputs, of_outputs = [], []
        for number, (output, gradient) in enumerate(zip(computed.outputs, gradients, strict=True)):
            share = 1.0 if output.dim() else self._share(number, shard)
            if gradient is not None and output.requires_grad and share:
                outputs.append(output)
                of_outputs.append(gradient[self._cut.rows(shard)] if output.dim() else gradient * share)
        return outputs, of_outputs


@contextmanager
def _explained_memory() -> Iterator[None]:
    """Add to an error for a lack of memory what takes less of it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            error.add_note(
                f"{NOTE}prepare(..., recompute=True) keeps no activations from the forward to the backward pass, and "
                "with a higher num_shards each pass has fewer samples"
            )
        raise


def _dense(gradients: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    dense = [torch.zeros_like(each) if given is None else given for each, given in gradients]
    return [*dense, torch.tensor([given is not None for _, given in gradients])]


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, or a number that stands for it where that is not counted."""
    if isinstance(tensor, Deferred):
        return int(tensor.is_changed)
    return 0 if tensor.is_inference() else tensor._version


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


NOTE = "resile: "
"""How a note that is added to an error of PyTorch begins."""
_TENSOR = object()
