"""One call of a divided model: the rounds in which workers exchange what their shards have, forward and backward."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from resile_shared.errors import ResileError, UsageError

from ...collectives.tree import Interval, ranges
from ...session import StateLost
from ...state.facts import Facts
from ..buffer_rules import Part
from ..buffers import Deltas
from ..digest import content_digest
from ..header import ComputedShards, PartialSums
from ..seeds import seeded
from ..slots import local_plan
from ..terms import Term, combined, shares, terms_of
from ..watch.repeatability import ShardFingerprint
from .additivity import (
    CHANGES_INPUTS,
    CHANGES_PARAMETERS,
    FAILS,
    HOOKED,
    IN_FULL,
    OTHER_SHAPES,
    UNCERTAIN,
    Compute,
    counted,
    differences,
    kept,
    of_batch_statistics,
    uses_changed,
)
from .deferred import Deferred
from .exchanging import Divided
from .gathering import ShardTensors
from .hooks import ParameterHooks
from .passes import Gradients, Inputs, Passes
from .rows import MAX_BYTES, MAX_OUTPUT_BYTES, MAX_SENT_BYTES, Cut, misses_rows, quick_digest, weight


class Undividable(Exception):
    """What a call returns cannot be put together from what its shards have."""


class Repeat(Exception):
    """A call is to be repeated, since a worker by itself has seen a batch that is not what all have seen."""


class Call:
    """One call of a divided model."""

    def __init__(self, model: Divided, inputs: Inputs, cut: Cut) -> None:
        self._model = model
        self._run = run = model.run
        self._cut = cut
        run.buffers.adopt_changed()  # by the script, or by calls that were computed in full
        self._seed = run.next_seed()
        self._passes = Passes(
            model,
            inputs,
            cut,
            seed=self._seed,
            share=lambda number, shard: self._shares[number][shard],
            sent_at_once=model.sent_at_once,
        )
        self._batch = run.sent_with_outputs(cut)
        """The batch of which small tensors are sent with the outputs, if any."""
        self._compares = run.compares_first_shard
        self._first_shard: ShardFingerprint | None = None
        self._sent = ShardTensors(cut.num_shards, self._sent_of)
        self._shares: dict[int, list[float]] = {}
        """By how much each shard counts in an output that is a single value, by the number of the output."""
        self._iteration = run.iteration
        self._versions = self._parameter_versions()
        self._is_over = False
        self._folded: Interval | None = None
        """The shards whose changes to buffers are folded."""

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs that are tensors."""
        return self._passes.tensors

    @property
    def is_differentiable(self) -> list[bool]:
        """Whether each output depends on parameters or inputs that want a gradient."""
        return [each.is_differentiable for each in self._passes.outputs]

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Return the outputs with their structure, from the ``tensors`` that `forward` returned."""
        return self._passes.structured(tensors)

    def check(self, hooked: str) -> bool:
        """Raise Undividable if outputs of a row depend on other rows, by as many of them as a shard has.

        All workers look at the same rows, and find the same. ``hooked`` is the name of a layer with a hook, if any.
        Returns whether that could be seen: not by a single row.
        """
        rows = slice(0, min(max(self._cut.size(0), 2), self._cut.num_rows))
        found = [HOOKED.format(name=hooked)] if hooked else self._mixed(rows)
        if self._passes.changes_inputs:
            found = [*found, CHANGES_INPUTS]
        if self._versions != self._parameter_versions():
            found = [*found, CHANGES_PARAMETERS]
        if found:
            raise Undividable("; and ".join(found))
        return rows.stop > 1 or self._cut.num_shards == 1

    def _mixed(self, rows: slice) -> list[str]:
        """Say in what way ``rows`` depend on each other; what cannot be computed for a part of them, is no part."""

        def compute(part: slice, seed: int) -> list[Tensor]:
            outputs = self._passes.of_rows(part, shard=seed)
            if message := misses_rows(outputs, num_rows=part.stop - part.start):
                raise Undividable(f"{message}, {IN_FULL}")
            return [each for each in outputs if isinstance(each, Tensor)]

        is_whole = rows.stop < 2 or self._cut.num_shards == 1
        found: list[str] = []
        try:
            for look in (_computed,) if is_whole else (kept, counted, uses_changed, differences):
                with seeded(self._seed):
                    found = found or look(self._model.model, compute, rows)
                self._run.buffers.restore()
            if not (found or is_whole):
                with seeded(self._seed):
                    self._model.note_statistics(lambda: of_batch_statistics(self._model.model, compute, rows))
                self._run.buffers.restore()
            return found
        except (ResileError, Undividable):
            raise
        except Exception as error:  # the model's own; if it is not by parts, the call in full raises it again
            if hasattr(error, "__notes__"):  # a lack of memory
                raise
            return [FAILS.format(kind=type(error).__name__, error=str(error).partition("\n")[0])]

    def undo(self) -> None:
        """Undo what the call has changed."""
        self._passes.undo()

    def forward(self) -> list[Tensor]:
        """Compute this worker's shards, and return the outputs of all; those that are sent late are deferred."""
        run = self._run
        with seeded(self._seed):
            result = run.exchange(
                self._compute_forward, self._facts, sums_of=run.buffers if run.buffers.has_statistics else None
            )
            late = self._exchange_late(result.late) if result.late else {}
            run.buffers.commit(result.totals.deltas | late)
            self._sent.receive(header.computed.rows for header in result.headers)
            self._complete(self._sent)
        shards = [iter(each) for each in self._sent.all(self._device)]
        sent = {number: each for number, each in enumerate(self._passes.outputs) if not each.is_late}
        parts = {number: [next(shard) for shard in shards] for number in sent}
        terms = {number: [next(shard) for shard in shards] for number in sent}
        if self._batch and not self._batch.take([list(shard) for shard in shards]):
            raise Repeat
        return [
            Deferred(_LateOutput(self, number), each.shape, each.dtype, each.device)
            if each.is_late
            else self._joined(number, parts[number], terms[number]).to(each.device)
            for number, each in enumerate(self._passes.outputs)
        ]

    def _compute_forward(self) -> ComputedShards:
        run, held = self._run, self._held()
        plan = local_plan(self._cut.num_shards, held)
        run.buffers.begin(plan)
        opened = run.rounds.open(self._cut.num_shards, run.buffers.partials(plan), run.buffers.sums)
        self._passes.forget()
        self._sent.forget_own()
        for step, shard in zip(plan.steps, range(*held), strict=True):
            self._compute_shard(shard)
            run.buffers.collect(self._part(shard), step)
            self._sent.own(shard)
            if run.recomputes:
                self._passes.drop(shard)
        if (held.lo > 0 and self._compares) or held.lo == held.hi:
            self._compute_shard(0)  # to be compared, or to know the structure of the outputs
            self._passes.drop(0)
        for number in range(len(run.buffers.sums)):
            opened.exchange.push(number)
        partials = [PartialSums(deltas=deltas) for deltas in run.buffers.changes(plan)]
        rows = self._sent.pieces(range(*held), at_most=self._at_most())
        buffers = run.buffers
        self._folded = held
        return ComputedShards(
            partials, first_shard=self._first_shard, left=buffers.values.left, late=buffers.late, rows=rows
        )

    def _exchange_late(self, late: Sequence[int]) -> Deltas:
        """Combine the changes to buffers that are too large for a header, in a round of their own."""
        run, found = self._run, {}

        def compute() -> ComputedShards:
            held = self._held()
            plan = local_plan(self._cut.num_shards, held)
            if self._folded != held:  # a member was lost, or it was in this round, in which they were used
                for step, shard in zip(plan.steps, range(*held), strict=True):
                    self._compute_shard(shard)
                    run.buffers.collect(self._part(shard), step, folds_statistics=False)
                    if run.recomputes:
                        self._passes.drop(shard)
            self._folded = None
            sums = run.buffers.late_sums(late, plan)
            found.update(sums.changes)
            opened = run.rounds.open(self._cut.num_shards, sums.partials, sums.sums, maxima=sums.maxima)
            for number in range(len(sums.sums)):
                opened.exchange.push(number)
            return ComputedShards([PartialSums() for _ in plan.pieces])

        run.exchange(compute, dict, sums_of=None)
        return found

    def _part(self, shard: int) -> Part:
        rows = self._cut.rows(shard)
        return Part(shard, self._cut.num_shards, rows.start, rows.stop, self._cut.num_rows)

    def _compute_shard(self, shard: int) -> None:
        computed = self._passes.forward(shard)
        if self._compares and shard == 0:
            self._first_shard = ShardFingerprint(content_digest(computed.inputs), content_digest(computed.outputs))

    def _facts(self) -> Facts:
        return {"inputs": quick_digest(self.tensors), "other_outputs": repr(self._passes.constants)}

    def _sent_of(self, shard: int) -> list[Tensor]:
        """What a shard sends: outputs, the terms of each, and rows of the batch."""
        computed = self._passes.computed(shard).outputs
        outputs = [each for each, known in zip(computed, self._passes.outputs, strict=True) if not known.is_late]
        terms = [[] if each.dim() else terms_of(each) for each in outputs]
        batch = self._batch.sent_of(self._cut.rows(shard)) if self._batch else []
        return [
            *(each.detach() for each in outputs),
            *(torch.tensor(each, dtype=torch.float64).reshape(-1, 3) for each in terms),
            *batch,
        ]

    def _joined(self, number: int, parts: Sequence[Tensor], terms: Sequence[Tensor]) -> Tensor:
        """Join output ``number`` of all shards."""
        if not self._passes.outputs[number].is_single:
            if len({each.shape[1:] for each in parts}) > 1:
                raise Undividable(OTHER_SHAPES.format(one=tuple(parts[0].shape), other=tuple(parts[-1].shape)))
            return torch.cat(list(parts))
        kinds = [[Term(*each) for each in shard.tolist()] for shard in terms]
        found = shares(kinds, parts, [weight(self._cut, shard) for shard in range(self._cut.num_shards)])
        if found is None:
            raise Undividable(UNCERTAIN)
        self._shares[number] = found
        return combined(parts, found)

    def late(self, number: int) -> Tensor:
        """Return output ``number``, which is sent now.

        If the script first uses it after the backward pass, it cannot be computed again for a worker that is lost
        meanwhile: from then on it is sent at once. Raises StateLost if one is.
        """
        output = self._passes.outputs[number]
        if self._run.iteration != self._iteration:
            raise UsageError(
                f"an output of the model, of {output.num_bytes / (1 << 20):.1f} MiB, was first used in a later "
                f"iteration: outputs of more than {MAX_SENT_BYTES >> 20} MiB are sent when the body uses them. Use it "
                "in the body that has called the model, as in `guesses = logits.argmax(-1)`"
            )
        is_over = self._is_over or self._versions != self._parameter_versions()
        if output.num_bytes > MAX_OUTPUT_BYTES:
            self._model.compute_in_full(
                f"an output of the model has {output.num_bytes >> 20} MiB for a batch, and the body of the loop uses "
                "it, so that all workers would receive it: each computes the model in full instead, as long as one "
                "worker would take. Compute the loss in the model, and return what is small"
            )
        elif is_over:
            self._model.send_at_once(number)

        def compute(shard: int) -> list[Tensor]:
            computed = self._passes.late(shard, number, is_over=is_over)
            if computed is None:  # another worker had it, which was lost
                raise StateLost
            return [computed]

        rows = ShardTensors(self._cut.num_shards, compute)
        with seeded(self._seed):
            self._complete(rows)
        return torch.cat([part for (part,) in rows.all(self._device)]).to(output.device)

    def backward(self, gradients: Gradients) -> list[Tensor | None]:
        """Add the gradients of all shards to those of the parameters; return those of the inputs that are tensors.

        ``gradients`` are those of the outputs.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient goes through a prepared model (create_graph=True): compute this call in full "
                "on each worker, as in `with resile.training.undivided(): score = critic(x)`"
            )
        self._passes.check_inputs()
        model = self._model
        of_inputs = ShardTensors(self._cut.num_shards, lambda shard: self._passes.input_gradients(shard, gradients))
        hooks = ParameterHooks(model.parameters)
        before = [parameter.grad for parameter in model.parameters]
        try:
            with seeded(self._seed), hooks.suspended():
                result = self._run.exchange(
                    lambda: self._compute_backward(gradients, of_inputs),
                    lambda: {"output_gradients": quick_digest(gradients)},
                    sums_of=model.gradients,
                )
                if any(self._passes.wants_gradient):
                    of_inputs.receive(header.computed.rows for header in result.headers)
                    self._complete(of_inputs)
        finally:
            for parameter, gradient in zip(model.parameters, before, strict=True):
                parameter.grad = gradient
        self._run.accumulated.on_backward()
        model.gradients.add(result.totals.used, hooks.replaced)
        hooks.follow(result.totals.used)
        self._is_over = True
        return self._joined_gradients(of_inputs)

    def _compute_backward(self, gradients: Gradients, of_inputs: ShardTensors) -> ComputedShards:
        folded, held = self._model.gradients, self._held()
        folded.clear()
        of_inputs.forget_own()
        plan = folded.begin(self._cut.num_shards, held)
        opened = self._run.rounds.open(self._cut.num_shards, folded.partials(plan), folded.sums())
        for step, shard in zip(plan.steps, range(*held), strict=True):
            is_last = shard == held.hi - 1
            computed = self._passes.computed(shard)
            if is_last:
                folded.overlap(plan, opened.exchange.push)
            else:
                folded.expect(step)
            of_inputs.keep(shard, self._passes.backward(shard, computed, gradients))
            if not is_last:
                folded.fold(step)
        folded.push_rest(opened.exchange.push)
        wants = any(self._passes.wants_gradient)
        rows = of_inputs.pieces(range(*held), at_most=self._at_most()) if wants else b""
        return ComputedShards([PartialSums() for _ in plan.pieces], used=bytes(folded.used), rows=rows)

    def _joined_gradients(self, of_inputs: ShardTensors) -> list[Tensor | None]:
        """Join the gradients of the inputs that are tensors; None for those that have none."""
        if not any(self._passes.wants_gradient):
            return [None] * len(self.tensors)
        shards = of_inputs.all(self._device)
        are_given = torch.stack([given for *_, given in shards]).any(0).tolist()
        places = count()
        found: list[Tensor | None] = []
        for by_rows, wants in zip(self._passes.is_by_rows, self._passes.wants_gradient, strict=True):
            place = next(places) if wants else None
            if place is None or not are_given[place]:
                found.append(None)
                continue
            parts = [shard[place] for shard in shards]
            found.append(torch.cat(parts) if by_rows else sum(parts[1:], parts[0]))
        return found

    def _complete(self, tensors: ShardTensors) -> None:
        """Take part in rounds of headers until all workers have all ``tensors``."""

        def compute() -> ComputedShards:
            self._run.rounds.open(0)
            return ComputedShards(rows=tensors.pieces(range(*self._held()), at_most=self._at_most()))

        while not tensors.is_complete(is_alone=self._is_alone):
            result = self._run.exchange(compute, dict, sums_of=None)
            tensors.receive(header.computed.rows for header in result.headers)

    def _held(self) -> Interval:
        """The shards that this worker computes now."""
        rank, size = self._run.place()
        return ranges(self._cut.num_shards, size)[rank]

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other member."""
        return self._run.place()[1] == 1

    def _at_most(self) -> int:
        """How many bytes of rows this worker sends in a round: none if it is alone."""
        return 0 if self._is_alone else MAX_BYTES // self._run.place()[1]

    @property
    def _device(self) -> torch.device:
        return next((each.device for each in self.tensors), torch.device("cpu"))

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for parameter in self._model.parameters]


def _computed(model: nn.Module, compute: Compute, rows: slice) -> list[str]:
    """Compute ``rows``, which are all."""
    compute(rows, 0)
    return []


class DividedCall(torch.autograd.Function):
    """A call of a divided model, as PyTorch's autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs."""
        outputs = call.forward()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(each for each, differs in zip(outputs, call.is_differentiable, strict=True) if not differs)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Compute the gradients of the inputs, and those of the parameters."""
        return None, None, *ctx.call.backward(gradients)


class _LateOutput:
    """Where the values of an output are that is sent when the body uses it."""

    has_rows = False

    def __init__(self, call: Call, number: int) -> None:
        self._call = call
        self._number = number

    def values(self, tensor: Deferred) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            found: Tensor = _Sending.apply(tensor, self._call, self._number)  # type: ignore[no-untyped-call]
        return found

    def rows(self, rows: slice) -> Tensor:
        """Never called: it costs what all values do."""
        raise NotImplementedError


class _Sending(torch.autograd.Function):
    """Sends an output that the call has returned without values."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Call, number: int) -> Tensor:
        return call.late(number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None, None
