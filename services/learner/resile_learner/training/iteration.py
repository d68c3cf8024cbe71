"""One iteration of the training loop: the shards this worker computes, and the exchange that makes them one batch."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, reduce, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from torch import Tensor
from torch.amp import GradScaler

from resile_shared.errors import ResileError, UsageError

from ..collectives.spec import Abandoned
from ..messages import Warned
from .buffer_rules import Part
from .buffers import Deltas
from .data.batches import Indices
from .data.fetch import Fetched
from .header import NO_INDICES, ComputedShards, PartialSums, RoundHeader, add_scalars, fold_leaves
from .leaves import SHARD_SQUARES, Leaves
from .loss_weights import forget_weight, has_weight, weigh
from .noise import SquaredNorms
from .rounds import RoundResult
from .seeds import mix, seed_all
from .stragglers import Pace
from .watch.changed_buffers import ChangedBuffers
from .watch.first_shard import FirstShard
from .watch.joint_rows import JointRows
from .watch.losses import NotANumber, check_not_summed
from .watch.repeatability import check_same_batch, read_twice
from .workspace import IterationSpec, Workspace

P = ParamSpec("P")
T = TypeVar("T")


class EvaluationAbandoned(Exception):
    """A member was lost while a closure was evaluated: the optimizer's step is undone."""


def _remembered(method: Callable[Concatenate["Iteration", P], T]) -> Callable[Concatenate["Iteration", P], T]:
    """Remember what ``method`` raises: a script that catches it gets that error again, not one that follows from it."""

    @wraps(method)
    def call(iteration: "Iteration", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(iteration, *args, **kwargs)
        except ResileError as error:
            iteration.refusal = error
            raise

    return call


class Iteration:
    """One optimizer step over one global batch.

    ``loss`` and ``metrics`` are those of the global batch once `exchange` has returned True. ``header(n)`` builds the
    header of the round after ``n`` exchanges of this iteration.
    """

    def __init__(self, spec: IterationSpec, workspace: Workspace, header: Callable[[int], RoundHeader]) -> None:
        self.number = spec.number
        self.turn = spec.turn
        self.is_last_turn = spec.is_last_turn
        self.epoch = spec.batch.epoch
        self.ends_epoch = spec.batch.ends_epoch and spec.is_last_turn
        self.num_samples = len(spec.batch.indices)
        self.num_shards = spec.batch.num_shards
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.norms: SquaredNorms | None = None
        self.outcome: RoundResult | None = None
        self.first_headers: Sequence[RoundHeader] = ()
        """The headers of the first evaluation, once it is exchanged."""
        self.lost: Abandoned | None = None
        self._spec = spec
        self._workspace = workspace
        self._make_header = header
        self._batch = spec.batch
        self._held = spec.held
        self._gradients = workspace.gradients[spec.turn]
        self._buffers = workspace.buffers
        self._phases = workspace.session.phases
        self._determinism = workspace.determinism
        self._keeps_shards = spec.keeps_shards
        self._kept: dict[int, Fetched] = {}
        self._allows_nan = False
        self._processor = 0.0
        self._first_shard: FirstShard
        self._watched = ExitStack()
        self._changed: ChangedBuffers | None = None
        """Watches the current shard, if it does."""
        self._is_spare = False
        """Whether the current shard does not count: it is another worker's, or is computed again."""
        self._joint: JointRows | None = None
        """Compares the current pass with others, if it does. The pass does not count."""
        self.has_begun = False
        """Whether the script has taken a shard or, if this worker holds none, begun the exchange."""
        self.refusal: ResileError | None = None
        self.num_exchanges = 0
        """The number of exchanges so far: more than one where a closure is evaluated several times."""
        self._is_in_closure = False
        self._first: tuple[float | None, dict[str, float]] | None = None
        """The loss and the metrics of the first evaluation."""
        self._begin_evaluation()

    def _begin_evaluation(self) -> None:
        self.outcome = None
        self._first_shard = FirstShard(is_alone=self._is_alone)
        self._header = self._make_header(self.num_exchanges)
        self._plan = self._gradients.begin(
            self._batch.num_leaves,
            self._spec.leaves,
            self.num_held if self._sums_share else None,
            measures_norms=self._spec.measures_noise,
            digests_first=self._compares and self._held.lo == 0 and self.num_held > 0,
        )
        self._buffers.begin(self._plan)
        self._round = self._workspace.rounds.open(
            self._batch.num_leaves,
            [*self._gradients.partials(self._plan), *self._buffers.partials(self._plan)],
            [*self._gradients.sums(), *self._buffers.sums],
        )
        self._leaves = Leaves(self._batch, self._held, self._workspace.loss_weights)
        self._indices: list[Indices] = []

    def begin_closure(self) -> None:
        """The optimizer's step evaluates a closure: the shards are computed, and exchanged, once for each evaluation.

        Raises UsageError if they were already, and for a second step.
        """
        if self.num_exchanges or self._is_in_closure:
            raise UsageError(
                "optimizer.step(closure) was called after the gradients of the iteration were exchanged, or twice: "
                "call it once, and compute and exchange them in the closure alone"
            )
        self._is_in_closure = self._keeps_shards = True

    def end_closure(self) -> None:
        """The step is complete. The loss of the iteration is that of the first evaluation, as ``step`` returns it."""
        if not self.outcome:
            raise UsageError("the optimizer did not call the closure that its step was given")
        self._is_in_closure = False
        if self._first:
            self.loss, self.metrics = self._first

    def evaluate_again(self) -> bool:
        """Begin another evaluation, if the step of the optimizer needs one; return whether it does."""
        if not (self._is_in_closure and self.outcome):
            return False
        self._first = self._first or (self.loss, self.metrics)
        self._begin_evaluation()
        return True

    @property
    def is_exchanged(self) -> bool:
        """Whether the gradients of the global batch are exchanged, and no closure is to be evaluated again."""
        return self.outcome is not None and not self._is_in_closure

    @property
    def is_complete(self) -> bool:
        """Whether the batch is done: exchanged for the last of the optimizers."""
        return self.is_exchanged and self.is_last_turn

    @property
    def is_first_evaluation(self) -> bool:
        """Whether the shards are computed for the first time."""
        return self.num_exchanges == 0

    def shards(self) -> Iterator[Any]:
        """The collated batches of the shards that this worker computes; call `backward` once for each."""
        if self.lost and self._is_in_closure:
            raise EvaluationAbandoned
        self.evaluate_again()
        self._processor = time.process_time()
        if self._spec.view.rank == 0 and self.is_first_evaluation:
            yield from self._joint_rows()
        for done, leaf in enumerate(range(*self._held)):
            is_last = done == self.num_held - 1
            if is_last and self._compares and (self._held.lo > 0 or self._is_alone):
                yield from self.spare_shard()  # before the last shard, whose gradients are exchanged as they come
            self._phases.enter("data")
            fetched = self._read(leaf)
            if self._compares and leaf == 0:
                check_same_batch(fetched.batch, read_twice(partial(self._read_again, 0)).batch)
                self._first_shard.on_batch(fetched.batch)
            self._indices.append(fetched.indices)
            self._begin_shard(leaf)
            if is_last:
                self._gradients.overlap(self._plan, self._round.exchange.push)
            else:
                self._gradients.expect(self._plan.steps[done])
            with self._workspace.watch.shard(is_last=is_last), self._watched:
                if self.number == 0 and not done:
                    self._watch_changes()
                yield fetched.batch
            self._check_shard(is_computed=len(self._leaves.computed) == done + 1)

    def _watch_changes(self) -> None:
        """In the first shard of a run, watch whether the loss depends on what the shard changes in declared buffers."""
        if (declared := self._buffers.declared) and self.is_first_evaluation:
            self._changed = self._watched.enter_context(ChangedBuffers(list(declared.values())))

    def _check_changed(self, loss: Tensor) -> None:
        """Raise UsageError for a loss that depends on what the shard has changed in declared buffers."""
        self._watched.close()
        changed, self._changed = self._changed, None
        if changed and changed.reached([loss]):
            raise UsageError(
                f"the loss of a shard depends on a buffer ({', '.join(self._buffers.declared)}) after the shard has "
                "changed it, where plain PyTorch would compute with what the whole batch has changed: compute with the "
                'buffer first and change it afterwards, or use prepare(), whose body="batch" computes such a model in '
                "full"
            )

    def withdraw(self) -> None:
        """The run ends before this iteration, before any of its shards was taken."""
        self._workspace.rounds.withdraw(self._round)

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other worker to compare shard 0 with; a single shard is computed once, as plainly."""
        return self._spec.view.size == 1 and self._batch.num_shards > 1

    def _joint_rows(self) -> Iterator[Any]:
        """Rows of the batch in two parts and as one, in passes that do not count. A difference is warned of."""
        joint = self._workspace.joint
        for rows in joint.passes(self.number // self._spec.num_turns, self._batch, self._gradients):
            self._phases.enter("data")
            fetched = self._workspace.source.read_again(self._batch, rows)
            self._begin_shard(0)
            self._joint = joint
            with self._workspace.watch.shard(is_last=False), joint.computing(len(fetched.indices)):
                yield fetched.batch
            self._check_shard(is_computed=self._joint is None)
        if warning := joint.finding():
            self._warn(warning)

    def _compute_joint(
        self, joint: JointRows, loss: Tensor, run: Callable[[Tensor], None], value: Tensor | float
    ) -> None:
        self._joint = None
        found = self._leaves.weight_of(loss, num_samples=joint.num_samples)
        weight = float(joint.num_samples) if found.value is None else found.value
        if weight:
            self._run(loss, run, share=weight / self.num_samples)
        joint.add(loss, float(value.detach() if isinstance(value, Tensor) else value), weight, found.warning)

    def _run(self, loss: Tensor, run: Callable[[Tensor], None], *, share: float) -> None:
        weighted = loss if share == 1.0 else loss * share
        with self._determinism.backward(weighted):
            run(weighted)

    @property
    def _compares(self) -> bool:
        return self._spec.is_compared and self.is_first_evaluation

    def _read(self, leaf: int) -> Fetched:
        """Read a shard: again for a later evaluation, since the body may have changed what it was given."""
        fetched = self._kept.get(leaf) or (self._read_next() if self.is_first_evaluation else self._read_again(leaf))
        if not self._keeps_shards:
            return fetched
        self._kept[leaf] = fetched
        return fetched._replace(batch=copy.deepcopy(fetched.batch))

    def _read_next(self) -> Fetched:
        return self._workspace.source.next_shard(self._spec.position, self.turn, self._spec.view)

    def _read_again(self, leaf: int) -> Fetched:
        return self._workspace.source.read_again(self._batch, self._batch.rows(leaf))

    @property
    def num_held(self) -> int:
        """How many shards this worker computes."""
        return self._held.hi - self._held.lo

    @property
    def _sums_share(self) -> bool:
        """Whether the shards of this worker are one leaf of the tree, in fast mode."""
        return self.num_held > 0 and self._batch.num_leaves < self._batch.num_shards

    @property
    def num_computed(self) -> int:
        """How many shards all workers have computed, once they are exchanged."""
        headers = self.outcome.headers if self.outcome else ()
        return sum(header.computed.pace.shards for header in headers if header.computed.pace)

    @property
    def is_computed(self) -> bool:
        """Whether `backward` was called for all shards that this worker computes."""
        return len(self._leaves.computed) == self.num_held

    def spare_shard(self) -> Iterator[Any]:
        """Shard 0, which another worker holds: to run a loop's body where no shard is held, and to compare workers.

        Its backward pass goes through `compute`, but nothing of it counts.
        """
        self._phases.enter("data")
        read = partial(self._read_again, 0)
        fetched = read_twice(read) if self._compares else read()
        self._first_shard.on_batch(fetched.batch)
        self._begin_shard(0)
        self._is_spare = True
        with self._workspace.watch.shard(is_last=not self.num_held):
            yield fetched.batch
        self._check_shard(is_computed=not self._is_spare)

    def restore_buffers(self) -> None:
        """Undo what the rest of a loop's body, which trains with another optimizer, has changed in buffers."""
        self._buffers.restore()

    def raise_refusal(self) -> None:
        """Raise again what `compute` or `exchange` refused, if the script has caught it."""
        if self.refusal:
            raise self.refusal

    def _check_shard(self, *, is_computed: bool) -> None:
        self.raise_refusal()
        if not is_computed:
            raise UsageError(
                "iteration.backward(loss) was not called exactly once for a shard: call it once for each shard"
            )

    def _begin_shard(self, leaf: int) -> None:
        self._begin()
        self._phases.enter("compute")
        self._determinism.apply()
        self._buffers.restore()
        self._gradients.clear()
        forget_weight()
        seed_all(mix(self._spec.seed, "compute", self.number // self._spec.num_turns, leaf))

    def _begin(self) -> None:
        if self.has_begun:
            return
        workspace = self._workspace
        workspace.received.begin_iteration()
        workspace.attributes.close()
        for text in workspace.attributes.warnings():
            self._warn(text)
        self._buffers.adopt_changed()
        self._determinism.begin_iteration()
        self.has_begun = True

    def backward(
        self, loss: Tensor, *, scaler: Any = None, weight: Tensor | float | None = None, **metrics: Tensor | float
    ) -> None:
        """Compute the gradients of the current shard from its mean ``loss``, a scalar.

        ``scaler`` is the GradScaler that scales the loss, one of the loop's ``state``. ``weight`` is the sum of the
        weights in the mean (see `weigh`); None: what the graph of the loss shows, as for ``cross_entropy`` with
        weights of classes or ignored targets, else the number of samples. ``metrics`` are means over the shard, to be
        averaged over the global batch.
        """
        if weight is not None:
            weigh(weight)
        if isinstance(scaler, GradScaler) and not any(scaler is known for known in self._workspace.scalers):
            raise UsageError(
                "the GradScaler is not part of the run's state, so that a joining worker would scale otherwise: pass "
                'it to the training call, as in ElasticLoop(..., state={"scaler": scaler})'
            )

        def run(weighted: Tensor) -> None:
            (weighted if scaler is None else scaler.scale(weighted)).backward()

        self.compute(loss, run, {"loss": loss, **metrics}, allows_nan=scaler is not None)

    @_remembered
    def compute(
        self,
        loss: Tensor,
        run: Callable[[Tensor], None],
        values: Mapping[str, Tensor | float],
        *,
        allows_nan: bool,
    ) -> None:
        """Compute the gradients of the current shard: ``run`` the backward pass of ``loss``, weighted by its samples.

        ``values`` are means over the shard, among them "loss". Nothing of a spare shard is kept.
        """
        self._allows_nan = allows_nan
        if self._joint:
            self._check_loss(loss, self._joint.num_samples)
            self._compute_joint(self._joint, loss, run, values["loss"])
            return
        if self._changed:
            self._check_changed(loss)
        is_spare, self._is_spare = self._is_spare, False
        leaf = 0 if is_spare else self._held.lo + len(self._leaves.computed)
        num_samples = len(self._batch.shard(leaf))
        self._check_loss(loss, num_samples)
        if self._compares and leaf == 0:
            self._first_shard.on_loss(values["loss"], is_spare=is_spare)
        computed, warning = self._leaves.weighed(loss, values, num_samples=num_samples)
        if warning:
            self._warn(warning)
        if computed.share:  # a shard that counts nothing may have no loss
            self._run(loss, run, share=computed.share)
        if self._compares:
            self._workspace.watch.on_backward()
        step = None if is_spare else self._plan.steps[leaf - self._held.lo]
        self._buffers.collect(self._part(leaf), step)
        if is_spare:
            if self._compares:
                self._first_shard.on_spare_gradients(self._gradients.digest())
            self._gradients.clear()
            return
        if step and leaf < self._held.hi - 1:
            self._gradients.fold(step)
        self._leaves.add(computed)

    def _check_loss(self, loss: Tensor, num_samples: int) -> None:
        if loss.numel() != 1:
            raise UsageError(
                f"the loss has shape {tuple(loss.shape)}: loss_fn has to return the mean over its batch, a scalar"
            )
        if not has_weight():
            check_not_summed(loss, num_samples=num_samples, batch_size=self.num_samples)

    def _warn(self, text: str) -> None:
        if self._spec.view.rank == 0:
            self._workspace.session.report(Warned(worker=self._spec.view.me, message=text))

    @_remembered
    def exchange(self) -> bool:
        """Sum over all workers: parameters get the gradients, and the model the buffers, of the global batch.

        Returns False when a member was lost meanwhile: nothing has changed, and the loop repeats the iteration. In a
        closure it then ends the optimizer's step, which is undone.
        """
        if self.outcome or self.lost:
            raise UsageError("iteration.exchange() was called a second time: call it once, after the last shard")
        if not self.is_computed:
            raise UsageError(
                "iteration.exchange() was called before all shards were computed: take all of iteration.shards() first"
            )
        self._begin()
        self._workspace.state.note_modes()
        self._workspace.attributes.open()
        self._gradients.push_rest(self._round.exchange.push)
        if self._compares and self._held.lo == 0 and self.num_held:
            operations = self._determinism.reproducibility.operations
            self._first_shard.on_own_gradients(self._gradients.first_digest(), has_same_bits=not operations)
        for number in range(len(self._buffers.sums)):
            self._round.exchange.push(len(self._gradients.buckets) + number)
        partials = self._partials()  # on a device, this waits for the last of the compute
        self._phases.enter("waiting")
        try:
            indices = np.concatenate([NO_INDICES, *self._indices])
            operations = self._determinism.reproducibility.operations
            used = bytes(self._gradients.used)
            computed = ComputedShards(
                partials,
                indices,
                used,
                self._pace(),
                operations,
                self._first_shard.fingerprint,
                self._buffers.values.left,
                self._buffers.late,
            )
            header = replace(self._header, computed=computed)
            outcome = self._round.finish(header, next_iteration=self.number + 1, trains=True)
            self.outcome, late = self._exchange_late(outcome) if outcome.late else (outcome, {})
        except Abandoned as lost:
            self.lost = lost
            if self._is_in_closure:
                raise EvaluationAbandoned from lost
            if not self._spec.has_epochs:
                self._buffers.restore()
                self._workspace.received.abandon_iteration()
            return False
        totals = self.outcome.totals
        self.first_headers = self.first_headers or self.outcome.headers
        self.metrics = dict(totals.scalars)
        scale = self._leaves.scale(self.metrics)
        self.loss = self.metrics.pop("loss") * scale
        if math.isnan(self.loss) and self.is_first_evaluation and not self._allows_nan:
            raise NotANumber(self.number)
        self._determinism.reproducibility.agree(totals.operations)
        self._determinism.apply()  # the update depends on it as well
        self._buffers.commit(totals.deltas | late)
        self._gradients.assign(totals.used, scale=scale)
        if self._spec.measures_noise:
            of_batch = self._gradients.square_of_sums() / self._scale**2
            self.norms = SquaredNorms(self.metrics.pop(SHARD_SQUARES), of_batch)
        self.num_exchanges += 1
        seed_all(mix(self._spec.seed, "update", self.number))  # whichever shard this worker computed last
        self._phases.enter("callback")
        return True

    def _exchange_late(self, first: RoundResult) -> tuple[RoundResult, Deltas]:
        """Combine the changes to buffers that are too large for a header, in a round that follows the ``first``."""
        late = self._buffers.late_sums(first.late, self._plan)
        opened = self._workspace.rounds.open(self._batch.num_leaves, late.partials, late.sums, maxima=late.maxima)
        for number in range(len(late.sums)):
            opened.exchange.push(number)
        computed = ComputedShards([PartialSums() for _ in self._plan.pieces])
        header = replace(self._make_header(self.num_exchanges + 1), computed=computed)
        second = opened.finish(header, next_iteration=self.number + 1, trains=True)
        headers = [
            replace(newer, computed=older.computed) for newer, older in zip(second.headers, first.headers, strict=True)
        ]
        return replace(first, tag=second.tag, headers=headers, named=second.named, raw=second.raw), late.changes

    def _pace(self) -> Pace:
        data, compute, callback = self._phases.take_seconds(("data", "compute", "callback"))
        processor = time.process_time() - self._processor
        return Pace(len(self._leaves.computed), data, compute, processor, callback, *self._spec.last)

    def _partials(self) -> Sequence[PartialSums]:
        squares = self._gradients.squares() if self._spec.measures_noise else []

        def of_leaf(leaf: int) -> PartialSums:
            sums = self._leaves.sums(leaf)
            if squares:  # of the loss as it was scaled for the backward pass
                square = squares[leaf - self._held.lo] / self._scale**2
                sums[SHARD_SQUARES] = self._leaves.square(leaf, square)
            return PartialSums(sums)

        if self._sums_share:
            folded = [PartialSums(reduce(add_scalars, (of_leaf(leaf).scalars for leaf in range(*self._held))))]
        else:
            folded = [fold_leaves(piece, of_leaf) for piece in self._plan.pieces]
        changes = self._buffers.changes(self._plan)
        return [replace(each, deltas=deltas) for each, deltas in zip(folded, changes, strict=True)]

    def _part(self, leaf: int) -> Part:
        num_shards, num_rows = self._batch.num_shards, len(self._batch.indices)
        return Part(leaf, num_shards, num_rows * leaf // num_shards, num_rows * (leaf + 1) // num_shards, num_rows)

    @property
    def _scale(self) -> float:
        """The scale of the GradScaler, which all gradients of the iteration have; 1 without one."""
        scalers = self._workspace.scalers
        return float(scalers[0].get_scale()) if scalers else 1.0
