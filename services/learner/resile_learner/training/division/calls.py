"""One call of a divided model: what its shards compute, forward and backward, on whichever worker holds them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from resile_shared.errors import UsageError

from ...collectives.tree import ranges
from ...state.facts import Facts
from ..buffers import Buffers
from ..gradients import Gradients
from ..header import ComputedShards, PartialSums, fold_leaves
from ..rounds import RoundResult, Rounds
from ..seeds import mix, seed_all, seeded
from ..slots import local_plan
from .accumulated import AccumulatedGradients
from .rows import Cut, TreeSpec, check_outputs, cut_into, decode, encode, flat, joined, look, unflat, weight


class Exchanging(Protocol):
    """What a divided model needs of the run that it is trained in."""

    buffers: Buffers
    num_shards: int
    accumulated: AccumulatedGradients

    @property
    def rounds(self) -> Rounds:
        """Opens the rounds."""

    def exchange(self, compute: Callable[[], ComputedShards], facts: Facts) -> RoundResult:
        """Take part in a round within the body; ``compute`` may be called again, for other shards."""

    def place(self) -> tuple[int, int]:
        """Return the rank of this worker, and the number of workers."""

    def next_seed(self) -> int:
        """Return a seed for the next call, alike on all workers."""

    def begin_shard(self) -> None:
        """Set what determines the bits of a shard."""


@dataclass
class _Shard:
    """What one shard has computed: outputs with their graph, and the inputs that want a gradient."""

    outputs: list[Any]
    inputs: list[Any]


class Division:
    """Divides the calls of ``model`` that compute gradients; other calls are computed in full by every worker."""

    def __init__(self, model: nn.Module, run: Exchanging) -> None:
        self.model = model
        self.run = run
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients = Gradients(self.parameters)
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes PyTorch ask for gradients of a call, whatever its inputs are."""
        self._forward: Callable[..., Any] = model.forward
        self._is_in_shard = False
        model.forward = _Forward(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of all rows, those of other workers' shards included."""
        leaves, spec = flat((args, kwargs))
        num_rows = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)
        if self._is_in_shard or _is_undivided.get() or not torch.is_grad_enabled() or num_rows == 0:
            return self._forward(*args, **kwargs)
        call = Call(self, leaves, spec, cut_into(num_rows, self.run.num_shards))
        outputs = _Divided.apply(call, self.anchor, *call.tensors)  # type: ignore[no-untyped-call]
        return call.rebuild(outputs)

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


@dataclass
class Call:
    """One call of a divided model."""

    division: Division
    leaves: list[Any]
    """The inputs, without their structure."""
    spec: TreeSpec
    cut: Cut
    shards: dict[int, _Shard] = field(default_factory=dict)
    """Those of this worker, from the forward to the backward pass."""

    def __post_init__(self) -> None:
        run = self.division.run
        self._seed = run.next_seed()
        self._buffers_before = run.buffers.committed()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in {"cpu", *(each.device.type for each in self.tensors)}
            if torch.is_autocast_enabled(device)
        ]
        self._outputs: TreeSpec | None = None
        self._constants: list[Any] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the outputs with their structure."""
        assert self._outputs is not None
        remaining = iter(tensors)
        return unflat([next(remaining) if each is _TENSOR else each for each in self._constants], self._outputs)

    def forward(self) -> list[Tensor]:
        """Compute this worker's shards, and return the outputs of all."""
        run = self.division.run
        with seeded(self._seed):
            result = run.exchange(self._compute_forward, {"inputs": look(self.tensors)})
        run.buffers.commit(result.totals.deltas)
        rows = self._rows(result)
        first = self.shards[min(self.shards)].outputs
        tensors = [each for each in first if isinstance(each, Tensor)]
        return [
            joined([rows[shard][number] for shard in range(self.cut.num_shards)], self.cut).to(like.device)
            for number, like in enumerate(tensors)
        ]

    def _rows(self, result: RoundResult) -> dict[int, list[Any]]:
        """Return what the headers of a round have of each shard."""
        device = next((each.device for each in self.tensors), torch.device("cpu"))
        found: dict[int, list[Any]] = {}
        for header in result.headers:
            if header.computed.rows:
                found |= decode(header.computed.rows, device)
        return found

    def _held(self) -> range:
        rank, size = self.division.run.place()
        return range(*ranges(self.cut.num_shards, size)[rank])

    def _compute_forward(self) -> ComputedShards:
        run, held = self.division.run, self._held()
        plan = local_plan(self.cut.num_shards, ranges(self.cut.num_shards, run.place()[1])[run.place()[0]])
        run.buffers.begin(plan)
        opened = run.rounds.open(self.cut.num_shards, run.buffers.partials(plan), run.buffers.sums)
        self.shards.clear()
        deltas = {}
        for number, shard in enumerate(held):
            self.shards[shard] = self._compute_shard(shard)
            step = plan.steps[number]
            deltas[shard] = run.buffers.collect(weight=weight(self.cut, shard), first=shard == 0, step=step)
        if not held:  # to know the structure of the outputs
            self.shards[0] = self._compute_shard(0)
        for number in range(len(run.buffers.sums)):
            opened.exchange.push(number)
        partials = [fold_leaves(piece, lambda leaf: PartialSums({}, deltas[leaf])) for piece in plan.pieces]
        rows = encode({shard: self._tensors_of(self.shards[shard].outputs) for shard in held})
        return ComputedShards(partials, rows=rows)

    def _compute_shard(self, shard: int) -> _Shard:
        run = self.division.run
        run.buffers.restore()
        run.begin_shard()
        seed_all(mix(self._seed, shard))
        rows = self.cut.rows(shard)
        inputs = [self._part(leaf, rows) for leaf in self.leaves]
        args, kwargs = unflat(inputs, self.spec)
        with ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            outputs, self._outputs = flat(self.division.compute(args, kwargs))
        check_outputs(outputs, num_rows=self.cut.size(shard))
        self._constants = [_TENSOR if isinstance(each, Tensor) else each for each in outputs]
        return _Shard(outputs, inputs)

    def _part(self, leaf: Any, rows: slice) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        part = leaf.detach()[rows] if self.cut.is_by_rows(leaf) else leaf.detach()
        return part.requires_grad_(leaf.requires_grad)

    @staticmethod
    def _tensors_of(values: Sequence[Any]) -> list[Tensor]:
        return [each for each in values if isinstance(each, Tensor)]

    @property
    def is_differentiable(self) -> list[bool]:
        """[tensor]: whether an output depends on parameters or inputs that want a gradient."""
        return [each.requires_grad for each in self._tensors_of(self.shards[min(self.shards)].outputs)]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add the gradients of all shards to those of the parameters; return those of the inputs that are tensors."""
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient goes through a prepared model (create_graph=True): compute this call in full "
                "on each worker, as in `with resile.training.undivided(): score = critic(x)`"
            )
        division = self.division
        before = [parameter.grad for parameter in division.parameters]
        try:
            with seeded(self._seed):
                facts = {"output_gradients": look(gradients)}
                result = division.run.exchange(lambda: self._compute_backward(gradients), facts)
        finally:
            for parameter, gradient in zip(division.parameters, before, strict=True):
                parameter.grad = gradient
        division.run.accumulated.on_backward()
        division.gradients.add(result.totals.used)
        return self._input_gradients(result)

    def _compute_backward(self, gradients: Sequence[Tensor | None]) -> ComputedShards:
        division, run, held = self.division, self.division.run, self._held()
        rank, size = run.place()
        missing = [shard for shard in held if shard not in self.shards]
        if missing:
            self._compute_again(missing)
        division.gradients.clear()
        plan = division.gradients.begin(self.cut.num_shards, ranges(self.cut.num_shards, size)[rank])
        opened = run.rounds.open(self.cut.num_shards, division.gradients.partials(plan), division.gradients.sums())
        of_inputs: dict[int, list[Tensor | None]] = {}
        for number, shard in enumerate(held):
            if number == len(held) - 1:
                division.gradients.overlap(plan, opened.exchange.push)
            else:
                division.gradients.expect(plan.steps[number])
            of_inputs[shard] = self._backward_of(shard, gradients)
            if number < len(held) - 1:
                division.gradients.fold(plan.steps[number])
        division.gradients.push_rest(opened.exchange.push)
        partials = [PartialSums() for _ in plan.pieces]
        rows = encode(of_inputs) if any(each.requires_grad for each in self.tensors) else b""
        return ComputedShards(partials, used=bytes(division.gradients.used), rows=rows)

    def _compute_again(self, shards: Sequence[int]) -> None:
        """Compute the outputs of shards that another worker held, or whose graph was used already."""
        buffers = self.division.run.buffers
        now = buffers.committed()
        buffers.reset(self._buffers_before)
        for shard in shards:
            self.shards[shard] = self._compute_shard(shard)
        buffers.reset(now)

    def _backward_of(self, shard: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward pass of one shard; return the gradients of its inputs that are tensors."""
        computed = self.shards.pop(shard)
        given = [
            (output, gradient[self.cut.rows(shard)] if output.dim() else gradient * weight(self.cut, shard))
            for output, gradient in zip(self._tensors_of(computed.outputs), gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if given:
            outputs, of_outputs = zip(*given, strict=True)
            torch.autograd.backward(outputs, of_outputs)
        return [each.grad for each in self._tensors_of(computed.inputs)]

    def _input_gradients(self, result: RoundResult) -> list[Tensor | None]:
        rows = self._rows(result)
        found: list[Tensor | None] = []
        for number, leaf in enumerate(self.tensors):
            parts = [rows[shard][number] for shard in range(self.cut.num_shards)] if rows else [None]
            if not leaf.requires_grad or all(part is None for part in parts):
                found.append(None)
                continue
            part_of = [
                torch.zeros_like(self._part(leaf, self.cut.rows(s))) if p is None else p for s, p in enumerate(parts)
            ]
            found.append(torch.cat(part_of) if self.cut.is_by_rows(leaf) else sum(part_of[1:], part_of[0]))
        return found


class _Divided(torch.autograd.Function):
    """A call of a divided model, as PyTorch's autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(each for each, differs in zip(outputs, call.is_differentiable, strict=True) if not differs)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.call.backward(gradients)


@contextmanager
def undivided() -> Iterator[None]:
    """In this context each worker computes calls of prepared models in full, as for a gradient of a gradient."""
    token = _is_undivided.set(True)
    try:
        yield
    finally:
        _is_undivided.reset(token)


_is_undivided: ContextVar[bool] = ContextVar("resile_is_undivided", default=False)
_TENSOR = object()
