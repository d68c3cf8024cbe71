"""One call of a divided model: what its shards compute, forward and backward, on whichever worker holds them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from resile_shared.errors import UsageError

from ...collectives.tree import Interval, ranges
from ...state.facts import Facts
from ..buffers import Buffers
from ..gradients import Gradients
from ..header import ComputedShards, PartialSums, fold_leaves
from ..rounds import RoundResult, Rounds
from ..seeds import mix, seed_all, seeded
from ..slots import local_plan
from .accumulated import AccumulatedGradients
from .additivity import UNCERTAIN, counted, differences, kept, restore_attributes, save_attributes
from .gathering import Gathering
from .losses import Term, combined, shares, terms_of
from .rows import (
    MAX_BYTES,
    MAX_OUTPUT_BYTES,
    Cut,
    check_outputs,
    check_rows,
    check_size,
    cut_into,
    decode,
    encode,
    quick_digest,
    weight,
)


class Exchanging(Protocol):
    """What a divided model needs of the run that it is trained in."""

    buffers: Buffers
    num_shards: int
    accumulated: AccumulatedGradients
    undivided: "UndividedModels"

    @property
    def num_samples(self) -> int:
        """The number of samples of the batch that the loader gave."""

    @property
    def rounds(self) -> Rounds:
        """Opens the rounds."""

    def warn(self, message: str) -> None:
        """Tell the user, once."""

    def exchange(
        self, compute: Callable[[], ComputedShards], facts: Callable[[], Facts], *, sums_of: object
    ) -> RoundResult:
        """Take part in a round within the body; ``compute`` may be called again, for other shards.

        ``facts`` are asked for after it, and must be equal on all workers. ``sums_of`` is what holds the round's sums,
        `Gradients` or `Buffers`, if it has any.
        """

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


class _Undividable(Exception):
    """What a call returns cannot be put together from what its shards have."""


class Division:
    """Divides the calls of ``model`` that compute gradients; other calls are computed in full by every worker."""

    def __init__(self, model: nn.Module, run: Exchanging, *, number: int) -> None:
        self.model = model
        self._number = number
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
        leaves, spec = tree_flatten((args, kwargs))
        num_rows = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), 0)
        undivided = self.run.undivided
        is_asked = _is_undivided.get() or self._number in undivided.numbers
        if self._is_in_shard or is_asked or not torch.is_grad_enabled() or num_rows == 0:
            return self._forward(*args, **kwargs)
        check_rows([leaf for leaf in leaves if isinstance(leaf, Tensor)], num_samples=self.run.num_samples)
        call = Call(self, leaves, spec, cut_into(num_rows, self.run.num_shards))
        is_first = self._number not in undivided.called
        saved = save_attributes(self.model) if is_first else {}
        undivided.called.add(self._number)
        try:
            if is_first:
                call.check()
            outputs = _Divided.apply(call, self.anchor, *call.tensors)  # type: ignore[no-untyped-call]
        except _Undividable as reason:
            self.run.warn(str(reason))
            call.undo()
            restore_attributes(saved)
            undivided.numbers.add(self._number)
            return self._forward(*args, **kwargs)
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Store a model as one that computes all rows by itself."""
        return getattr, (self._division.model, "forward")


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
        run.buffers.adopt_changed()  # by the script, or by calls that were computed in full
        self._seed = run.next_seed()
        self._buffers_before = run.buffers.committed()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in {"cpu", *(each.device.type for each in self.tensors)}
            if torch.is_autocast_enabled(device)
        ]
        self._outputs: TreeSpec | None = None
        self._constants: list[Any] = []
        self._gathering = Gathering()
        self._own: dict[int, list[Any]] = {}
        self._contents: dict[int, bytes] = {}
        """What this worker has computed of each of its shards, and the same in bytes, as far as it was asked for."""
        self._shares: dict[int, list[float]] = {}
        """By how much each shard counts in an output that is a single value, by the number of the output."""

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the outputs with their structure."""
        assert self._outputs is not None
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if each is _TENSOR else each for each in self._constants], self._outputs)

    def forward(self) -> list[Tensor]:
        """Compute this worker's shards, and return the outputs of all."""
        run = self.division.run
        with seeded(self._seed):
            result = run.exchange(
                self._compute_forward, self._facts, sums_of=run.buffers if run.buffers.has_statistics else None
            )
            run.buffers.commit(result.totals.deltas)
            self._receive(result)
            while self._lacks_outputs():
                self._receive(run.exchange(self._compute_rest, dict, sums_of=None))
        device = next((each.device for each in self.tensors), torch.device("cpu"))
        rows = {
            shard: self._own_rows(shard) if shard in self.shards else decode(self._gathering[shard], device)[shard]
            for shard in range(self.cut.num_shards)
        }
        like = self._tensors_of(self.shards[min(self.shards)].outputs)
        return [self._joined(rows, number, len(like)).to(each.device) for number, each in enumerate(like)]

    def undo(self) -> None:
        """Undo what the call has changed."""
        self.division.run.buffers.reset(self._buffers_before)

    def _lacks_outputs(self) -> bool:
        """Whether another round is needed: a worker that is alone needs none for the shards that it has computed."""
        lacking = (shard for shard in range(self.cut.num_shards) if self._gathering.lacks(shard))
        return any(not self._is_alone or shard not in self.shards for shard in lacking)

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other member."""
        return self.division.run.place()[1] == 1

    def _receive(self, result: RoundResult) -> None:
        for header in result.headers:
            self._gathering.add(header.computed.rows)

    def _compute_rest(self) -> ComputedShards:
        """What is still to be sent of the outputs of this worker's shards; another may have held them before."""
        held = [shard for shard in range(*self._held()) if self._gathering.lacks(shard)]
        self._compute_missing(held)
        self.division.run.rounds.open(0)
        return ComputedShards(rows=self._pieces(held))

    def _pieces(self, shards: Sequence[int]) -> bytes:
        if self._is_alone:
            return b""
        return self._gathering.pieces(shards, self._content, at_most=MAX_BYTES // self.division.run.place()[1])

    def _content(self, shard: int) -> bytes:
        """The outputs of a shard that this worker has computed."""
        if shard not in self._contents:
            self._contents[shard] = encode({shard: self._own_rows(shard)})
        return self._contents[shard]

    def _own_rows(self, shard: int) -> list[Tensor]:
        """The outputs of a shard that this worker has computed, and behind them the terms of each."""
        if shard not in self._own:
            self._own[shard] = [each.detach() for each in self._with_terms(shard)]
        return self._own[shard]

    def _joined(self, rows: dict[int, list[Any]], number: int, num_outputs: int) -> Tensor:
        """Join output ``number`` of all shards, which is followed by the terms of each, if it is a single value."""
        parts = [rows[shard][number] for shard in range(self.cut.num_shards)]
        if parts[0].dim():
            return torch.cat(parts)
        terms = [[Term(*each) for each in rows[shard][num_outputs + number].tolist()] for shard in rows]
        found = shares(terms, parts, [weight(self.cut, shard) for shard in rows])
        if found is None:
            raise _Undividable(UNCERTAIN)
        self._shares[number] = found
        return combined(parts, found)

    def check(self) -> None:
        """Raise _Undividable if outputs of a row depend on other rows, by as many of them as a shard has.

        All workers look at the same rows, and find the same.
        """
        first = self.cut.rows(0)
        rows = slice(first.start, min(max(first.stop, 2), self.cut.num_rows))
        if rows.stop < 2 or self.cut.num_shards == 1:
            return

        def compute(part: slice, seed: int) -> list[Tensor]:
            return self._tensors_of(self._compute_rows(seed, part)[0])

        run = self.division.run
        with seeded(self._seed):
            model = self.division.model
            found = next(filter(None, (look(model, compute, rows) for look in (kept, counted, differences))), [])
        run.buffers.restore()
        if found:
            raise _Undividable("; and ".join(found))

    def _rows(self, result: RoundResult) -> dict[int, list[Any]]:
        """Return what the headers of a round have of each shard."""
        device = next((each.device for each in self.tensors), torch.device("cpu"))
        found: dict[int, list[Any]] = {}
        for header in result.headers:
            if header.computed.rows:
                found |= decode(header.computed.rows, device)
        return found

    def _facts(self) -> Facts:
        return {"inputs": quick_digest(self.tensors), "other_outputs": repr(self._plain(self._constants))}

    def _held(self) -> Interval:
        """The shards that this worker computes now."""
        rank, size = self.division.run.place()
        return ranges(self.cut.num_shards, size)[rank]

    def _compute_forward(self) -> ComputedShards:
        run, held = self.division.run, self._held()
        plan = local_plan(self.cut.num_shards, held)
        run.buffers.begin(plan)
        opened = run.rounds.open(self.cut.num_shards, run.buffers.partials(plan), run.buffers.sums)
        self.shards.clear()
        self._contents.clear()
        self._own.clear()
        deltas = {}
        for step, shard in zip(plan.steps, range(*held), strict=True):
            self.shards[shard] = self._compute_shard(shard)
            deltas[shard] = run.buffers.collect(weight=weight(self.cut, shard), first=shard == 0, step=step)
        if not deltas:  # to know the structure of the outputs
            self.shards[0] = self._compute_shard(0)
        for number in range(len(run.buffers.sums)):
            opened.exchange.push(number)
        partials = [fold_leaves(piece, lambda leaf: PartialSums({}, deltas[leaf])) for piece in plan.pieces]
        outputs = {shard: self._tensors_of(self.shards[shard].outputs) for shard in deltas}
        check_size(outputs, self.cut, what="the outputs of the model", most=MAX_OUTPUT_BYTES)
        return ComputedShards(partials, rows=self._pieces(list(deltas)))

    def _compute_shard(self, shard: int) -> _Shard:
        outputs, inputs = self._compute_rows(shard, self.cut.rows(shard))
        check_outputs(outputs, num_rows=self.cut.size(shard))
        constants = [_TENSOR if isinstance(each, Tensor) else each for each in outputs]
        if self._constants not in ([], constants):
            raise UsageError(
                f"the model returned {self._plain(constants)} for one part of a batch and "
                f"{self._plain(self._constants)} for another, which has no mean: return numbers as tensors, as in "
                "loss.detach() instead of loss.item()"
            )
        self._constants = constants
        return _Shard(outputs, inputs)

    def _compute_rows(self, shard: int, rows: slice) -> tuple[list[Any], list[Any]]:
        """Return the outputs of ``rows``, computed as ``shard``, and their inputs."""
        run = self.division.run
        run.buffers.restore()
        run.begin_shard()
        seed_all(mix(self._seed, shard))
        inputs = [self._part(leaf, rows) for leaf in self.leaves]
        args, kwargs = tree_unflatten(inputs, self.spec)
        with ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            outputs, self._outputs = tree_flatten(self.division.compute(args, kwargs))
        return outputs, inputs

    def _part(self, leaf: Any, rows: slice) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        part = leaf.detach()[rows] if self.cut.is_by_rows(leaf) else leaf.detach()
        return part.requires_grad_(leaf.requires_grad)

    @staticmethod
    def _plain(constants: Sequence[Any]) -> list[Any]:
        return [each for each in constants if each is not _TENSOR]

    @staticmethod
    def _tensors_of(values: Sequence[Any]) -> list[Tensor]:
        return [each for each in values if isinstance(each, Tensor)]

    def _with_terms(self, shard: int) -> list[Tensor]:
        """Return the outputs of a shard, and behind them the terms of each: none if it has rows."""
        outputs = self._tensors_of(self.shards[shard].outputs)
        terms = [[] if each.dim() else terms_of(each) for each in outputs]
        return [*outputs, *(torch.tensor(each, dtype=torch.float64).reshape(-1, 3) for each in terms)]

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
                result = division.run.exchange(
                    lambda: self._compute_backward(gradients),
                    lambda: {"output_gradients": quick_digest(gradients)},
                    sums_of=division.gradients,
                )
        finally:
            for parameter, gradient in zip(division.parameters, before, strict=True):
                parameter.grad = gradient
        division.run.accumulated.on_backward()
        division.gradients.add(result.totals.used)
        return self._input_gradients(result)

    def _compute_backward(self, gradients: Sequence[Tensor | None]) -> ComputedShards:
        folded, held = self.division.gradients, self._held()
        self._compute_missing(range(*held))
        folded.clear()
        plan = folded.begin(self.cut.num_shards, held)
        opened = self.division.run.rounds.open(self.cut.num_shards, folded.partials(plan), folded.sums())
        of_inputs: dict[int, list[Tensor | None]] = {}
        for step, shard in zip(plan.steps, range(*held), strict=True):
            is_last = shard == held.hi - 1
            if is_last:
                folded.overlap(plan, opened.exchange.push)
            else:
                folded.expect(step)
            of_inputs[shard] = self._backward_of(shard, gradients)
            if not is_last:
                folded.fold(step)
        folded.push_rest(opened.exchange.push)
        rows = of_inputs if any(each.requires_grad for each in self.tensors) else {}
        check_size(rows, self.cut, what="the gradients of the model's inputs", most=MAX_BYTES)
        return ComputedShards([PartialSums() for _ in plan.pieces], used=bytes(folded.used), rows=encode(rows))

    def _compute_missing(self, shards: Sequence[int]) -> None:
        """Compute again the outputs of those ``shards`` that another worker held, or whose graph was used already."""
        missing = [shard for shard in shards if shard not in self.shards]
        if not missing:
            return
        buffers = self.division.run.buffers
        now = buffers.committed()
        buffers.reset(self._buffers_before)
        for shard in missing:
            self.shards[shard] = self._compute_shard(shard)
        buffers.reset(now)

    def _backward_of(self, shard: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward pass of one shard; return the gradients of its inputs that are tensors."""
        computed = self.shards.pop(shard)
        given = []
        for number, (output, gradient) in enumerate(zip(self._tensors_of(computed.outputs), gradients, strict=True)):
            share = 1.0 if output.dim() else self._shares[number][shard]
            if gradient is not None and output.requires_grad and share:
                given.append((output, gradient[self.cut.rows(shard)] if output.dim() else gradient * share))
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
            dense = [
                torch.zeros_like(self._part(leaf, self.cut.rows(shard))) if part is None else part
                for shard, part in enumerate(parts)
            ]
            found.append(torch.cat(dense) if self.cut.is_by_rows(leaf) else sum(dense[1:], dense[0]))
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
