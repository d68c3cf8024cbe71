"""One call of a divided model: the rounds in which workers exchange what their shards have, forward and backward."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from resile_shared.errors import UsageError

from ...collectives.tree import Interval, ranges
from ...state.facts import Facts
from ..digest import content_digest
from ..header import ComputedShards, PartialSums, fold_leaves
from ..seeds import seeded
from ..slots import local_plan
from ..watch.repeatability import ShardFingerprint
from .additivity import UNCERTAIN, counted, differences, kept
from .deferred import Deferred
from .exchanging import Divided
from .gathering import ShardTensors
from .hooks import ParameterHooks
from .losses import Term, combined, shares, terms_of
from .passes import Gradients, Passes
from .rows import MAX_BYTES, MAX_OUTPUT_BYTES, MAX_SENT_BYTES, Cut, check_size, quick_digest, weight


class Undividable(Exception):
    """What a call returns cannot be put together from what its shards have."""


class Call:
    """One call of a divided model with ``leaves``, its inputs, whose structure is ``spec``."""

    def __init__(self, model: Divided, leaves: Sequence[Any], spec: TreeSpec, cut: Cut) -> None:
        self._model = model
        self._run = run = model.run
        self._cut = cut
        run.buffers.adopt_changed()  # by the script, or by calls that were computed in full
        self._seed = run.next_seed()
        self._passes = Passes(
            model, leaves, spec, cut, seed=self._seed, share=lambda number, shard: self._shares[number][shard]
        )
        self._batch = run.sent_with_outputs(cut)
        """The batch of which small tensors are sent with the outputs, if any."""
        self._compares = run.compares_first_shard
        self._first_shard: ShardFingerprint | None = None
        self._sent = ShardTensors(cut.num_shards, self._sent_of)
        self._shares: dict[int, list[float]] = {}
        """By how much each shard counts in an output that is a single value, by the number of the output."""
        self._late_gradients: dict[int, Tensor] = {}
        """Gradients of outputs that were sent late, by their number."""
        self._state = self._state_now()

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs that are tensors."""
        return self._passes.tensors

    @property
    def is_differentiable(self) -> list[bool]:
        """Whether each of the outputs that `forward` returns depends on parameters or inputs that want a gradient."""
        return [each.is_differentiable for each in self._passes.outputs if not each.is_late]

    def is_output_differentiable(self, number: int) -> bool:
        """Whether output ``number`` depends on parameters or inputs that want a gradient."""
        return self._passes.outputs[number].is_differentiable

    def outputs(self, tensors: Sequence[Tensor], link: Tensor) -> Any:
        """Return the outputs with their structure, from the ``tensors`` that `forward` returned.

        Those that are sent late are deferred; ``link`` leads their gradients to this call.
        """
        sent = iter(tensors)
        return self._passes.structured(
            [
                Deferred(_LateOutput(self, number, link), each.shape, each.dtype, each.device)
                if each.is_late
                else next(sent)
                for number, each in enumerate(self._passes.outputs)
            ]
        )

    def check(self) -> None:
        """Raise Undividable if outputs of a row depend on other rows, by as many of them as a shard has.

        All workers look at the same rows, and find the same.
        """
        first = self._cut.rows(0)
        rows = slice(first.start, min(max(first.stop, 2), self._cut.num_rows))
        if rows.stop < 2 or self._cut.num_shards == 1:
            return

        def compute(part: slice, seed: int) -> list[Tensor]:
            return self._passes.of_rows(part, shard=seed)

        with seeded(self._seed):
            looks = (look(self._model.model, compute, rows) for look in (kept, counted, differences))
            found = next(filter(None, looks), [])
        self._run.buffers.restore()
        if found:
            raise Undividable("; and ".join(found))

    def undo(self) -> None:
        """Undo what the call has changed."""
        self._passes.undo()

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
        sent = {number: each for number, each in enumerate(self._passes.outputs) if not each.is_late}
        parts = {number: [next(shard) for shard in shards] for number in sent}
        terms = {number: [next(shard) for shard in shards] for number in sent}
        if self._batch:
            for number in self._batch.sent:
                self._batch.give(number, torch.cat([next(shard) for shard in shards]).cpu())
        return [self._joined(number, parts[number], terms[number]).to(each.device) for number, each in sent.items()]

    def _compute_forward(self) -> ComputedShards:
        run, held = self._run, self._held()
        plan = local_plan(self._cut.num_shards, held)
        run.buffers.begin(plan)
        opened = run.rounds.open(self._cut.num_shards, run.buffers.partials(plan), run.buffers.sums)
        self._passes.forget()
        self._sent.forget_own()
        deltas = {}
        for step, shard in zip(plan.steps, range(*held), strict=True):
            self._compute_shard(shard)
            deltas[shard] = run.buffers.collect(weight=weight(self._cut, shard), first=shard == 0, step=step)
            self._sent.own(shard)
            if run.recomputes:
                self._passes.drop(shard)
        if 0 not in deltas and (self._compares or not deltas):
            self._compute_shard(0)  # to be compared, or to know the structure of the outputs
            self._passes.drop(0)
        for number in range(len(run.buffers.sums)):
            opened.exchange.push(number)
        partials = [fold_leaves(piece, lambda leaf: PartialSums({}, deltas[leaf])) for piece in plan.pieces]
        rows = self._sent.pieces(deltas, at_most=self._at_most())
        return ComputedShards(partials, first_shard=self._first_shard, rows=rows)

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
        batch = [self._batch.rows(each, self._cut.rows(shard)) for each in self._batch.sent] if self._batch else []
        return [
            *(each.detach() for each in outputs),
            *(torch.tensor(each, dtype=torch.float64).reshape(-1, 3) for each in terms),
            *batch,
        ]

    def _joined(self, number: int, parts: Sequence[Tensor], terms: Sequence[Tensor]) -> Tensor:
        """Join output ``number`` of all shards."""
        if not self._passes.outputs[number].is_single:
            return torch.cat(list(parts))
        kinds = [[Term(*each) for each in shard.tolist()] for shard in terms]
        found = shares(kinds, parts, [weight(self._cut, shard) for shard in range(self._cut.num_shards)])
        if found is None:
            raise Undividable(UNCERTAIN)
        self._shares[number] = found
        return combined(parts, found)

    def late(self, number: int) -> Tensor:
        """Return output ``number``, which is sent now."""
        output = self._passes.outputs[number]
        if self._state != self._state_now():
            raise UsageError(
                f"an output of the model of {output.num_bytes / (1 << 20):.1f} MiB was first used after backward(), or "
                f"in another iteration: outputs of more than {MAX_SENT_BYTES >> 20} MiB are sent when the body uses "
                "them. Use it before backward(), as in `guesses = logits.argmax(-1)`"
            )
        check_size(output.num_bytes, what="an output of the model", most=MAX_OUTPUT_BYTES)
        rows = ShardTensors(self._cut.num_shards, lambda shard: [self._passes.computed(shard).outputs[number].detach()])
        with seeded(self._seed):
            self._complete(rows)
        return torch.cat([part for (part,) in rows.all(self._device)]).to(output.device)

    def backward(self, gradients: Gradients) -> list[Tensor | None]:
        """Add the gradients of all shards to those of the parameters; return those of the inputs that are tensors.

        ``gradients`` are those of the outputs that `forward` returned.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient goes through a prepared model (create_graph=True): compute this call in full "
                "on each worker, as in `with resile.training.undivided(): score = critic(x)`"
            )
        model, outputs = self._model, self._passes.outputs
        sent, late, self._late_gradients = iter(gradients), self._late_gradients, {}
        of_outputs = [late.get(number) if each.is_late else next(sent) for number, each in enumerate(outputs)]
        of_inputs = ShardTensors(self._cut.num_shards, lambda shard: self._passes.input_gradients(shard, of_outputs))
        hooks = ParameterHooks(model.parameters)
        before = [parameter.grad for parameter in model.parameters]
        try:
            with seeded(self._seed), hooks.suspended():
                result = self._run.exchange(
                    lambda: self._compute_backward(of_outputs, of_inputs),
                    lambda: {"output_gradients": quick_digest(of_outputs)},
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
        self._state = ()
        return self._joined_gradients(of_inputs)

    def add_late_gradient(self, number: int, gradient: Tensor) -> None:
        """Take the gradient of an output that was sent late, before `backward`."""
        self._late_gradients[number] = gradient

    def _compute_backward(self, of_outputs: Gradients, of_inputs: ShardTensors) -> ComputedShards:
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
            of_inputs.keep(shard, self._passes.backward(shard, computed, of_outputs))
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
        for leaf, wants in zip(self.tensors, self._passes.wants_gradient, strict=True):
            place = next(places) if wants else None
            if place is None or not are_given[place]:
                found.append(None)
                continue
            parts = [shard[place] for shard in shards]
            found.append(torch.cat(parts) if self._cut.is_by_rows(leaf) else sum(parts[1:], parts[0]))
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

    def _state_now(self) -> tuple[int, ...]:
        """What is another one when outputs cannot be computed again."""
        return (self._run.iteration, *(parameter._version for parameter in self._model.parameters))


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
