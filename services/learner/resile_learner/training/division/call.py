"""One call of a divided model: what its shards compute, forward and backward, on whichever worker holds them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from resile_shared.errors import UsageError

from ...collectives.tree import Interval, ranges
from ...state.facts import Facts
from ..buffers import Buffers
from ..digest import content_digest
from ..gradients import Gradients
from ..header import ComputedShards, PartialSums, fold_leaves
from ..rounds import RoundResult, Rounds
from ..seeds import mix, seed_all, seeded
from ..slots import local_plan
from ..watch.repeatability import ShardFingerprint
from .accumulated import AccumulatedGradients
from .additivity import UNCERTAIN, counted, differences, kept
from .deferred import Deferred, is_deferred, rows_of, values_of
from .gathering import ShardTensors
from .hooks import ParameterHooks
from .losses import Term, combined, shares, terms_of
from .reading import OwnRows
from .rows import (
    MAX_BYTES,
    MAX_OUTPUT_BYTES,
    MAX_SENT_BYTES,
    Cut,
    check_outputs,
    check_size,
    quick_digest,
    weight,
)


class Exchanging(Protocol):
    """What a divided model needs of the run that it is trained in."""

    buffers: Buffers
    num_shards: int
    accumulated: AccumulatedGradients

    @property
    def iteration(self) -> int:
        """The number of the open iteration."""

    @property
    def recomputes(self) -> bool:
        """Whether shards are computed again for their backward pass, one after the other, which takes less memory."""

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

    def sent_with_outputs(self, cut: Cut) -> OwnRows | None:
        """Return the batch whose small tensors are sent with the outputs of the call that was just given a seed."""

    @property
    def compares_first_shard(self) -> bool:
        """Whether this worker computes the first shard of the call that was just given a seed, to be compared."""

    def computing(self) -> AbstractContextManager[None]:
        """A shard is computed in this context. Raises NotRepeatable."""

    def computing_gradients(self, outputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """The backward pass of ``outputs`` runs in this context."""


class Undividable(Exception):
    """What a call returns cannot be put together from what its shards have."""


class Divided(Protocol):
    """The model of a call."""

    run: Exchanging
    model: nn.Module
    parameters: list[Tensor]
    gradients: Gradients

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Compute a shard."""


@dataclass
class _Shard:
    """What one shard has computed: outputs with their graph, and the inputs that want a gradient."""

    outputs: list[Any]
    inputs: list[Any]


class _Output(NamedTuple):
    """What all shards know of an output."""

    is_single: bool
    shape: tuple[int, ...]
    """[all rows, ...]"""
    dtype: torch.dtype
    device: torch.device
    is_differentiable: bool

    @property
    def num_bytes(self) -> int:
        """The size of all rows."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_late(self) -> bool:
        """Whether it is sent only when the body uses it."""
        return not self.is_single and self.num_bytes > MAX_SENT_BYTES


@dataclass
class Call:
    """One call of a divided model."""

    division: Divided
    leaves: list[Any]
    """The inputs, without their structure."""
    spec: TreeSpec
    cut: Cut
    shards: dict[int, _Shard] = field(default_factory=dict)
    """Those of this worker, from the forward to the backward pass."""

    def __post_init__(self) -> None:
        run = self._run = self.division.run
        run.buffers.adopt_changed()  # by the script, or by calls that were computed in full
        self._seed = run.next_seed()
        self._batch = run.sent_with_outputs(self.cut)
        """The batch of which small tensors are sent with the outputs, if any."""
        self._compares = run.compares_first_shard
        self._first_shard: ShardFingerprint | None = None
        self._buffers_before = run.buffers.committed()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in {"cpu", *(each.device.type for each in self.tensors)}
            if torch.is_autocast_enabled(device)
        ]
        self._spec: TreeSpec | None = None
        """The structure of the outputs."""
        self._constants: list[Any] = []
        self._outputs: list[_Output] = []
        """Those outputs that are tensors."""
        self._sent = ShardTensors(self.cut.num_shards, self._sent_of)
        self._shares: dict[int, list[float]] = {}
        """By how much each shard counts in an output that is a single value, by the number of the output."""
        self._late_gradients: dict[int, Tensor] = {}
        """Gradients of outputs that were sent late, by their number."""
        self._state = self._state_now()

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def is_differentiable(self) -> list[bool]:
        """Whether each of the outputs that `forward` returns depends on parameters or inputs that want a gradient."""
        return [each.is_differentiable for each in self._outputs if not each.is_late]

    def is_output_differentiable(self, number: int) -> bool:
        """Whether output ``number`` depends on parameters or inputs that want a gradient."""
        return self._outputs[number].is_differentiable

    def outputs(self, tensors: Sequence[Tensor], link: Tensor) -> Any:
        """Return the outputs with their structure, from the ``tensors`` that `forward` returned.

        Those that are sent late are deferred; ``link`` leads their gradients to this call.
        """
        assert self._spec is not None
        sent = iter(tensors)
        found = iter(
            [
                Deferred(_LateOutput(self, number, link), each.shape, each.dtype, each.device)
                if each.is_late
                else next(sent)
                for number, each in enumerate(self._outputs)
            ]
        )
        return tree_unflatten([next(found) if each is _TENSOR else each for each in self._constants], self._spec)

    def forward(self) -> list[Tensor]:
        """Compute this worker's shards, and return those outputs of all that are sent at once."""
        run = self._run
        with seeded(self._seed):
            result = run.exchange(
                self._compute_forward, self._facts, sums_of=run.buffers if run.buffers.has_statistics else None
            )
            run.buffers.commit(result.totals.deltas)
            self._sent.receive(header.computed.rows for header in result.headers)
            self._complete(self._sent)
        shards = [iter(each) for each in self._sent.all(self._device)]
        sent = {number: each for number, each in enumerate(self._outputs) if not each.is_late}
        parts = {number: [next(shard) for shard in shards] for number in sent}
        terms = {number: [next(shard) for shard in shards] for number in sent}
        for number in self._batch.sent if self._batch else ():
            assert self._batch
            self._batch.give(number, torch.cat([next(shard) for shard in shards]).cpu())
        return [self._joined(number, parts[number], terms[number]).to(each.device) for number, each in sent.items()]

    def late(self, number: int) -> Tensor:
        """Return output ``number``, which is sent now."""
        output = self._outputs[number]
        if self._state != self._state_now():
            raise UsageError(
                f"an output of the model of {output.num_bytes / (1 << 20):.1f} MiB was first used after backward(), or "
                f"in another iteration: outputs of more than {MAX_SENT_BYTES >> 20} MiB are sent when the body uses "
                "them. Use it before backward(), as in `guesses = logits.argmax(-1)`"
            )
        check_size(output.num_bytes, what="an output of the model", most=MAX_OUTPUT_BYTES)
        rows = ShardTensors(self.cut.num_shards, lambda shard: [self._tensors_of(shard)[number].detach()])
        with seeded(self._seed):
            self._complete(rows)
        return torch.cat([part for (part,) in rows.all(self._device)]).to(output.device)

    def undo(self) -> None:
        """Undo what the call has changed."""
        self._run.buffers.reset(self._buffers_before)

    @property
    def _device(self) -> torch.device:
        return next((each.device for each in self.tensors), torch.device("cpu"))

    def _state_now(self) -> tuple[int, ...]:
        """What is another one when outputs cannot be computed again."""
        return (self._run.iteration, *(parameter._version for parameter in self.division.parameters))

    def _complete(self, rows: ShardTensors) -> None:
        """Take part in rounds of headers until all workers have all ``rows``."""

        def compute() -> ComputedShards:
            self._run.rounds.open(0)
            return ComputedShards(rows=rows.pieces(range(*self._held()), at_most=self._at_most()))

        while not rows.is_complete(is_alone=self._is_alone):
            result = self._run.exchange(compute, dict, sums_of=None)
            rows.receive(header.computed.rows for header in result.headers)

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other member."""
        return self._run.place()[1] == 1

    def _at_most(self) -> int:
        """How many bytes of rows this worker sends in a round: none if it is alone."""
        return 0 if self._is_alone else MAX_BYTES // self._run.place()[1]

    def _sent_of(self, shard: int) -> list[Tensor]:
        """What a shard sends: outputs, the terms of each, and rows of the batch."""
        outputs = [
            each for each, known in zip(self._tensors_of(shard), self._outputs, strict=True) if not known.is_late
        ]
        terms = [[] if each.dim() else terms_of(each) for each in outputs]
        batch = [self._batch.rows(each, self.cut.rows(shard)) for each in self._batch.sent] if self._batch else []
        return [
            *(each.detach() for each in outputs),
            *(torch.tensor(each, dtype=torch.float64).reshape(-1, 3) for each in terms),
            *batch,
        ]

    def _joined(self, number: int, parts: Sequence[Tensor], terms: Sequence[Tensor]) -> Tensor:
        """Join output ``number`` of all shards."""
        if not self._outputs[number].is_single:
            return torch.cat(list(parts))
        kinds = [[Term(*each) for each in shard.tolist()] for shard in terms]
        found = shares(kinds, parts, [weight(self.cut, shard) for shard in range(self.cut.num_shards)])
        if found is None:
            raise Undividable(UNCERTAIN)
        self._shares[number] = found
        return combined(parts, found)

    def check(self) -> None:
        """Raise Undividable if outputs of a row depend on other rows, by as many of them as a shard has.

        All workers look at the same rows, and find the same.
        """
        first = self.cut.rows(0)
        rows = slice(first.start, min(max(first.stop, 2), self.cut.num_rows))
        if rows.stop < 2 or self.cut.num_shards == 1:
            return

        def compute(part: slice, seed: int) -> list[Tensor]:
            return _tensors(self._compute_rows(seed, part)[0])

        with seeded(self._seed):
            model = self.division.model
            found = next(filter(None, (look(model, compute, rows) for look in (kept, counted, differences))), [])
        self._run.buffers.restore()
        if found:
            raise Undividable("; and ".join(found))

    def _facts(self) -> Facts:
        return {"inputs": quick_digest(self.tensors), "other_outputs": repr(_plain(self._constants))}

    def _held(self) -> Interval:
        """The shards that this worker computes now."""
        rank, size = self._run.place()
        return ranges(self.cut.num_shards, size)[rank]

    def _compute_forward(self) -> ComputedShards:
        run, held = self._run, self._held()
        plan = local_plan(self.cut.num_shards, held)
        run.buffers.begin(plan)
        opened = run.rounds.open(self.cut.num_shards, run.buffers.partials(plan), run.buffers.sums)
        self.shards.clear()
        self._sent.forget_own()
        deltas = {}
        for step, shard in zip(plan.steps, range(*held), strict=True):
            self._compute_first(shard)
            deltas[shard] = run.buffers.collect(weight=weight(self.cut, shard), first=shard == 0, step=step)
            self._sent.own(shard)
            if run.recomputes:
                del self.shards[shard]
        if 0 not in deltas and (self._compares or not deltas):
            self._compute_first(0)  # to be compared, or to know the structure of the outputs
            del self.shards[0]
        for number in range(len(run.buffers.sums)):
            opened.exchange.push(number)
        partials = [fold_leaves(piece, lambda leaf: PartialSums({}, deltas[leaf])) for piece in plan.pieces]
        rows = self._sent.pieces(deltas, at_most=self._at_most())
        return ComputedShards(partials, first_shard=self._first_shard, rows=rows)

    def _compute_first(self, shard: int) -> None:
        self.shards[shard] = computed = self._compute_shard(shard)
        if self._compares and shard == 0:
            inputs, outputs = _tensors(computed.inputs), _tensors(computed.outputs)
            self._first_shard = ShardFingerprint(content_digest(inputs), content_digest(outputs))

    def _computed(self, shard: int) -> _Shard:
        """Return a shard with its graph, computed again if another worker held it, or if the graph is gone."""
        if shard in self.shards:
            return self.shards[shard]
        buffers = self._run.buffers
        now = buffers.committed()
        buffers.reset(self._buffers_before)
        computed = self._compute_shard(shard)
        buffers.reset(now)
        if not self._run.recomputes:
            self.shards[shard] = computed
        return computed

    def _compute_shard(self, shard: int) -> _Shard:
        outputs, inputs = self._compute_rows(shard, self.cut.rows(shard))
        check_outputs(outputs, num_rows=self.cut.size(shard))
        constants = [_TENSOR if isinstance(each, Tensor) else each for each in outputs]
        if self._constants not in ([], constants):
            raise UsageError(
                f"the model returned {_plain(constants)} for one part of a batch and {_plain(self._constants)} for "
                "another, which has no mean: return numbers as tensors, as in loss.detach() instead of loss.item()"
            )
        self._constants = constants
        self._outputs = [self._known_of(each) for each in _tensors(outputs)]
        return _Shard(outputs, inputs)

    def _known_of(self, output: Tensor) -> _Output:
        shape = (self.cut.num_rows, *output.shape[1:]) if output.dim() else ()
        return _Output(not output.dim(), shape, output.dtype, output.device, output.requires_grad)

    def _compute_rows(self, shard: int, rows: slice) -> tuple[list[Any], list[Any]]:
        """Return the outputs of ``rows``, computed as ``shard``, and their inputs."""
        run = self._run
        run.buffers.restore()
        inputs = [self._part(leaf, rows) for leaf in self.leaves]
        args, kwargs = tree_unflatten(inputs, self.spec)
        seed_all(mix(self._seed, shard))
        with ExitStack() as stack:
            stack.enter_context(run.computing())
            stack.enter_context(explained_memory())
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            outputs, self._spec = tree_flatten(self.division.compute(args, kwargs))
        return outputs, inputs

    def _part(self, leaf: Any, rows: slice) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        part = (rows_of(leaf, rows) if self.cut.is_by_rows(leaf) else values_of(leaf)).detach()
        if part.data_ptr() % _ALIGNMENT:
            part = part.clone()
        return part.requires_grad_(_wants_gradient(leaf))

    def _tensors_of(self, shard: int) -> list[Tensor]:
        """The outputs of a shard that are tensors."""
        return _tensors(self._computed(shard).outputs)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add the gradients of all shards to those of the parameters; return those of the inputs that are tensors.

        ``gradients`` are those of the outputs that `forward` returned.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient goes through a prepared model (create_graph=True): compute this call in full "
                "on each worker, as in `with resile.training.undivided(): score = critic(x)`"
            )
        division = self.division
        sent, late, self._late_gradients = iter(gradients), self._late_gradients, {}
        hooks = ParameterHooks(division.parameters)
        of_outputs = [late.get(number) if each.is_late else next(sent) for number, each in enumerate(self._outputs)]
        of_inputs = ShardTensors(self.cut.num_shards, lambda shard: self._input_gradients(shard, of_outputs))
        before = [parameter.grad for parameter in division.parameters]
        try:
            with seeded(self._seed), hooks.suspended():
                result = self._run.exchange(
                    lambda: self._compute_backward(of_outputs, of_inputs),
                    lambda: {"output_gradients": quick_digest(of_outputs)},
                    sums_of=division.gradients,
                )
                if any(map(_wants_gradient, self.tensors)):
                    of_inputs.receive(header.computed.rows for header in result.headers)
                    self._complete(of_inputs)
        finally:
            for parameter, gradient in zip(division.parameters, before, strict=True):
                parameter.grad = gradient
        self._run.accumulated.on_backward()
        division.gradients.add(result.totals.used, hooks.replaced)
        hooks.follow(result.totals.used)
        self._state = ()
        return self._joined_gradients(of_inputs)

    def add_late_gradient(self, number: int, gradient: Tensor) -> None:
        """Take the gradient of an output that was sent late, before `backward`."""
        self._late_gradients[number] = gradient

    def _compute_backward(self, gradients: Sequence[Tensor | None], of_inputs: ShardTensors) -> ComputedShards:
        folded, held = self.division.gradients, self._held()
        folded.clear()
        of_inputs.forget_own()
        plan = folded.begin(self.cut.num_shards, held)
        opened = self._run.rounds.open(self.cut.num_shards, folded.partials(plan), folded.sums())
        for step, shard in zip(plan.steps, range(*held), strict=True):
            is_last = shard == held.hi - 1
            computed = self._computed(shard)
            if is_last:
                folded.overlap(plan, opened.exchange.push)
            else:
                folded.expect(step)
            self._backward_of(shard, computed, gradients)
            of_inputs.keep(shard, _wanted([each.grad for each in _tensors(computed.inputs)], computed))
            if not is_last:
                folded.fold(step)
        folded.push_rest(opened.exchange.push)
        rows = (
            of_inputs.pieces(range(*held), at_most=self._at_most()) if any(map(_wants_gradient, self.tensors)) else b""
        )
        return ComputedShards([PartialSums() for _ in plan.pieces], used=bytes(folded.used), rows=rows)

    def _backward_of(self, shard: int, computed: _Shard, gradients: Sequence[Tensor | None]) -> None:
        """Run the backward pass of one shard."""
        self.shards.pop(shard, None)
        outputs, of_outputs = self._differentiated(shard, computed, gradients)
        if outputs:
            with self._run.computing_gradients(outputs), explained_memory():
                torch.autograd.backward(outputs, of_outputs)

    def _input_gradients(self, shard: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Compute the gradients of the inputs alone, of a shard that another worker held."""
        computed = self._computed(shard)
        self.shards.pop(shard, None)
        outputs, of_outputs = self._differentiated(shard, computed, gradients)
        inputs = [each for each in _tensors(computed.inputs) if each.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if outputs:
            with self._run.computing_gradients(outputs), explained_memory():
                found = torch.autograd.grad(outputs, inputs, of_outputs, allow_unused=True)
        remaining = iter(found)
        return _wanted(
            [next(remaining) if each.requires_grad else None for each in _tensors(computed.inputs)], computed
        )

    def _differentiated(
        self, shard: int, computed: _Shard, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return those outputs of a shard that have a gradient, and the gradients."""
        outputs, of_outputs = [], []
        for number, (output, gradient) in enumerate(zip(_tensors(computed.outputs), gradients, strict=True)):
            share = 1.0 if output.dim() else self._shares[number][shard]
            if gradient is not None and output.requires_grad and share:
                outputs.append(output)
                of_outputs.append(gradient[self.cut.rows(shard)] if output.dim() else gradient * share)
        return outputs, of_outputs

    def _joined_gradients(self, of_inputs: ShardTensors) -> list[Tensor | None]:
        """Join the gradients of the inputs that are tensors; None for those that have none."""
        numbers = iter(range(len(self.tensors)))
        places = [next(numbers) if _wants_gradient(leaf) else None for leaf in self.tensors]
        if not any(place is not None for place in places):
            return [None for _ in places]
        shards = of_inputs.all(self._device)
        are_given = torch.stack([given for *_, given in shards]).any(0).tolist()
        found: list[Tensor | None] = []
        for leaf, place in zip(self.tensors, places, strict=True):
            if place is None or not are_given[place]:
                found.append(None)
                continue
            parts = [shard[place] for shard in shards]
            found.append(torch.cat(parts) if self.cut.is_by_rows(leaf) else sum(parts[1:], parts[0]))
        return found


class DividedCall(torch.autograd.Function):
    """A call of a divided model, as PyTorch's autograd sees it: its outputs, and a link to it for late ones."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs."""
        outputs = call.forward()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(each for each, differs in zip(outputs, call.is_differentiable, strict=True) if not differs)
        )
        return *outputs, torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Compute the gradients of the inputs, and those of the parameters."""
        return None, None, *ctx.call.backward(gradients[:-1])


class _LateOutput:
    """An output that is sent when the body uses it."""

    has_rows = False

    def __init__(self, call: Call, number: int, link: Tensor) -> None:
        self._call = call
        self._number = number
        self._link = link

    def values(self) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            found: Tensor = _Sending.apply(self._call, self._number, self._link)  # type: ignore[no-untyped-call]
        return found

    def rows(self, rows: slice) -> Tensor:
        return self.values()[rows]


class _Sending(torch.autograd.Function):
    """Sends an output late; its backward pass comes before that of the call, to which ``link`` leads."""

    @staticmethod
    def forward(ctx: Any, call: Call, number: int, link: Tensor) -> Tensor:
        ctx.call, ctx.number = call, number
        found = call.late(number)
        if not call.is_output_differentiable(number):
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.call.add_late_gradient(ctx.number, gradient)
        return None, None, torch.zeros(())


@contextmanager
def explained_memory() -> Iterator[None]:
    """Add to an error for a lack of memory what takes less of it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            error.add_note(
                "resile: prepare(..., recompute=True) keeps no activations from the forward to the backward pass, and "
                "with a higher num_shards each pass has fewer samples"
            )
        raise


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


def _wanted(gradients: Sequence[Tensor | None], computed: _Shard) -> list[Tensor]:
    """Return the gradients of the inputs that want one, zero where there is none, and behind them which are given."""
    wanted = [
        (each, given) for each, given in zip(_tensors(computed.inputs), gradients, strict=True) if each.requires_grad
    ]
    dense = [torch.zeros_like(each) if given is None else given for each, given in wanted]
    return [*dense, torch.tensor([given is not None for _, given in wanted])]


def _plain(constants: Sequence[Any]) -> list[Any]:
    return [each for each in constants if each is not _TENSOR]


def _wants_gradient(leaf: Tensor) -> bool:
    return not is_deferred(leaf) and leaf.requires_grad


_TENSOR = object()
_ALIGNMENT = 64
"""Of the memory that PyTorch allocates. Rows begin like that wherever they come from: kernels may depend on it."""
