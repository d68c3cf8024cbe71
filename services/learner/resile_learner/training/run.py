"""A training run on one worker: what it owns, and what happens in an iteration, in order.

`ElasticLoop`, `ElasticLoader` and the integrations drive a run; what they add is how a script sees it.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from resile_shared.errors import ResileError, UsageError

from ..checkpoint.checkpointer import Checkpointer
from ..collectives.tree import ranges
from ..messages import Ready
from ..session import Session, current_session
from ..state.facts import Facts
from ..state.run import RunState, Stateful
from .attributes import ScriptAttributes
from .base_run import BaseRun
from .batch_schedule import BatchSchedule, declared_range
from .buffers import Buffers
from .closures import ClosureSteps
from .data.batches import BatchPlan
from .data.sources import open_source
from .determinism import Determinism, Reproducibility, deterministic
from .digest import RollingDigest
from .gradients import gradients_of
from .header import RoundHeader
from .iteration import Iteration
from .learning_rate import LearningRateScale
from .loss_weights import LossWeights
from .noise import NoiseScale
from .prewarm import prewarm_devices, prewarm_optimizer
from .protocol import TrainingProtocol
from .received import ReceivedState
from .repeated_call import notes_of_call
from .rounds import Rounds
from .scalers import prepared_scalers
from .seeds import mix
from .settings import TrainingSettings, facts_of
from .validation import open_validator
from .watch.joint_rows import JointRows
from .watch.optimizer_watch import check_optimizers, optimizer_parts
from .watch.repeatability import NewMembers, is_compared_in_epoch, is_compared_iteration
from .watch.script_watch import ScriptWatch
from .workspace import IterationSpec, Workspace


class Run(BaseRun):
    """One training run. ``has_epochs``: the script has code of its own around the epochs, as with `ElasticLoader`.

    Raises UsageError for settings that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        dataset: Any,
        settings: TrainingSettings,
        *,
        has_epochs: bool = False,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        check_optimizers(self.optimizers)
        self.settings = settings
        self.session: Session = current_session()
        self.newest: Iteration | None = None
        """The newest iteration that `iterations` has yielded."""
        self._dataset = dataset
        self._has_epochs = has_epochs
        self._has_started = False
        self._equal: dict[str, object] = {}
        """Further settings of the script that must be equal on all workers."""
        self._last_members: tuple[int, ...] = ()
        """The members of the newest iteration that was committed on this worker."""
        self._source = open_source(dataset, settings, num_turns=self._num_turns, position=lambda: self._position)
        self._reproducibility = Reproducibility(settings.mode, caveats=self.session.caveats)
        self._schedule = self._open_schedule()
        parameters = list(model.parameters())
        self._gradients = gradients_of(self.optimizers, parameters)
        self._digest = RollingDigest(parameters)
        self._noise = NoiseScale()
        self._buffers = Buffers(model, combines_alike=True)
        # With a batch that changes, there may be more iterations than a schedule was made for.
        self._watch = ScriptWatch(
            model,
            self.optimizers,
            settings.state,
            mode=settings.mode,
            has_fixed_length=settings.batch_range is None and self._source.has_known_length,
        )
        self._new_members = NewMembers()
        self.closures = ClosureSteps(self.optimizers, self._watch.optimizers, self._buffers, lambda: self.newest)
        self.attributes = ScriptAttributes(model, self.optimizers)
        self.received = ReceivedState(
            model,
            self.optimizers,
            self.attributes,
            settings.state,
            iteration=lambda: self.iteration,
            has_begun_iteration=lambda: self._has_begun,
        )
        self._validator = open_validator(
            settings.validation,
            model,
            self.plan,
            seed=settings.seed,
            buffers=self._buffers,
            attributes=self.attributes,
        )
        if settings.batch_range:
            first = self.plan.batch_size
            for each in self.optimizers:
                LearningRateScale(each, settings.learning_rate_rule, lambda: self.plan.batch_size / first)
        self._scalers = prepared_scalers(settings.state, parameters)
        self.ledger = self._source.ledger()
        self.state = RunState(model, self._parts(), settings.state, after_load=self._on_load)
        self._checkpoints = Checkpointer(self.session, every=settings.checkpoint_every)
        self._protocol = TrainingProtocol(
            self.session,
            self,
            self.state,
            ledger=self.ledger,
            rounds=Rounds(self.session, self._buffers),
            checkpoints=self._checkpoints,
            schedule=self._schedule,
            validator=self._validator,
        )
        self._count_iterations()

    def require_equal(self, **settings: object) -> None:
        """Before the first iteration: name further settings of the script that must be equal on all workers."""
        self._equal |= settings

    def iterations(self) -> Generator[Iteration, None, None]:
        """Take part in the run to its end: yield each iteration, which is committed when the next one is asked for.

        The caller computes and exchanges it, and steps the optimizer.
        """
        if self._has_started:
            raise UsageError(
                "this loop has run already: a script has one training call; raise `epochs` to train longer"
            )
        self._has_started = True
        self._notes = [*notes_of_call(), *self._notes_of_batches()]
        with ExitStack() as stack:
            determinism = stack.enter_context(deterministic(self._reproducibility, threads=self.settings.threads))
            stack.callback(self._checkpoints.close)
            stack.callback(self._source.restart)
            stack.enter_context(self._watch.watching(self._may_update))
            self.state.facts = self._facts()
            self._prewarm()
            try:
                yield from self._protocol.run(self._ready(), partial(self._iterate, self._workspace(determinism)))
            except ResileError as error:
                self.session.failure = error
                raise

    def _iterate(self, workspace: Workspace) -> Iterator[Iteration]:
        """One iteration. Raises Abandoned if a member was lost in it."""
        self._warn_of_notes()
        phases, view = self.session.phases, self.session.view
        position, turn = self._position, self.state.progress.turn
        self._watch.check_unchanged(
            epoch=position.epoch, epochs=self.settings.epochs, iterations_total=self.iterations_total
        )

        phases.enter("data")
        self._source.resize(self._schedule.next(self.iteration, ordered=view.batch_size))
        batch = self._source.batch(position, view)
        self._count_iterations()

        is_due, has_same_bits = self._is_comparison_due, not self.settings.is_fast
        are_all_compared = is_due and has_same_bits
        self._watch.begin_iteration(is_compared=are_all_compared)
        self._buffers.begin_iteration(compares_values=is_due or view.workers != self._last_members)
        spec = IterationSpec(
            number=self.iteration,
            batch=batch,
            position=position,
            turn=turn,
            num_turns=self._num_turns,
            view=view,
            seed=self.settings.seed,
            is_compared=has_same_bits and (is_due or self._new_members.takes_part(view)),
            keeps_shards=self.closures.are_used,
            has_epochs=self._has_epochs,
            last=self._protocol.reports.last,
        )
        is_new = self._new_members.is_new and spec.held.hi > spec.held.lo
        self.newest = iteration = Iteration(
            spec, workspace, partial(self._header, compares_state=self._compares_state, is_new=is_new)
        )
        steps = self._watch.steps[turn]

        self.received.open_iteration(is_in_epoch=self._has_epochs and (position.sample > 0 or turn > 0))
        self.attributes.begin()
        phases.enter("callback")
        yield iteration
        phases.enter("waiting")

        if self.iteration == self.iterations_total:  # the script has ended the run before this iteration
            iteration.withdraw()
            return
        iteration.raise_refusal()
        may_skip = bool(self._scalers) or iteration.outcome is None
        self._watch.optimizers[turn].check_steps(before=steps, is_lost=iteration.lost is not None, may_skip=may_skip)
        if iteration.lost:
            raise iteration.lost
        if iteration.outcome is None:
            raise UsageError(
                "the body of the loop ended without iteration.exchange(): call it once, after the last shard"
            )
        self._watch.buffers.check(compares_caches=are_all_compared)
        self._watch.body.end_iteration(ends_epoch=iteration.ends_epoch)

        if iteration.norms:
            self._noise.add(iteration.norms, num_samples=iteration.num_samples, num_shards=iteration.num_computed)
        self._last_members = view.workers
        self._new_members.on_round(
            view,
            [header.is_new for header in iteration.first_headers],
            [header.computed.first_shard for header in iteration.first_headers],
        )
        self._protocol.commit(
            batch,
            iteration.outcome,
            loss=iteration.loss,
            metrics=iteration.metrics,
            noise_scale=self._noise.value,
            num_turns=self._num_turns,
        )

    def stop_before(self) -> None:
        """End the run before the open iteration, before any of its shards was taken, on all workers alike."""
        self.state.progress.iterations_total = self.iteration

    @property
    def plan(self) -> BatchPlan:
        """The batches of an epoch."""
        return self._source.plan

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the open iteration; between iterations and after the end, that of the newest one."""
        progress = self.state.progress
        is_open = self.newest is not None and self.newest.number == progress.iteration
        return progress.epoch if is_open else progress.last_epoch

    def digest(self, round_: int) -> int:
        """A check of the parameters with which round ``round_`` begins, to be compared with the other members'."""
        return self._digest.at(round_) ^ mix("steps", *self._watch.steps, self._schedule.current)

    def discard_round(self) -> None:
        """Undo what the abandoned round has changed."""
        self._buffers.restore()
        self.received.restore()

    def begin_membership(self) -> None:
        """From now on this worker holds other shards of each batch."""
        self._source.restart()

    def state_facts(self) -> Facts:
        """What must be equal on all members beside the parameters: the parts of the script's own state."""
        return self._watch.compared.parts()

    def _open_schedule(self) -> BatchSchedule:
        batch_range = self.settings.batch_range
        return BatchSchedule(
            self.plan.batch_size,
            declared_range(batch_range, num_shards=self.plan.num_shards) if batch_range else None,
            replayed=self.session.batches,
            has_fixed_length=batch_range is None and self._source.has_known_length,
        )

    def _parts(self) -> Mapping[str, Stateful]:
        """The parts of the run's state beside the model and the script's own."""
        return {
            **optimizer_parts(self.optimizers, self._watch.optimizers),
            "ledger": self.ledger,
            "reproducibility": self._reproducibility,
            "batches": self._schedule,
            "noise": self._noise,
            "attributes": self.attributes,
            "received": self.received,
            **self._source.parts,
            **({"validation": self._validator} if self._validator else {}),
        }

    def _facts(self) -> Facts:
        validation = self.settings.validation
        selection = {"selection": validation.selection} if validation and validation.selection else {}
        return facts_of(
            {**self.settings.facts(self.plan), **selection, **self._equal, "packages": self.session.packages},
            model=self.model,
            dataset=self._dataset,
            num_validation_samples=self._validator.num_samples if self._validator else 0,
            is_fast=self.settings.is_fast,
            known_probes=self.session.known_probes,
        )

    def _notes_of_batches(self) -> Iterator[str]:
        plan = self._source.plan
        if self._source.has_known_length and plan.joins_lone_sample and self.settings.batch_range is None:
            yield LONE_SAMPLE
        if self._has_epochs and self._num_turns > 1:
            yield SEVERAL_OPTIMIZERS.format(number=self._num_turns)

    def _workspace(self, determinism: Determinism) -> Workspace:
        return Workspace(
            session=self.session,
            source=self._source,
            state=self.state,
            rounds=self._protocol.rounds,
            gradients=self._gradients,
            buffers=self._buffers,
            attributes=self.attributes,
            received=self.received,
            scalers=self._scalers,
            loss_weights=None if self.settings.weighs_by_samples else LossWeights(),
            watch=self._watch.body,
            joint=JointRows(self.model, compares=not (self.settings.is_fast or self.settings.weighs_by_samples)),
            determinism=determinism,
        )

    def _ready(self) -> Ready:
        return Ready(
            worker=0,
            iterations_total=self.iterations_total,
            num_shards=self.plan.num_shards,
            batch_size=self._schedule.current,
            batch_range=None if self.session.batches else self._schedule.batch_range,
            epochs=self.settings.epochs,
            samples=self.plan.num_samples,
            bits=self.reproducibility,
            has_fixed_length=self._schedule.has_fixed_length,
            micro_batch_size=self.plan.micro_batch_size,
        )

    def _prewarm(self) -> None:
        """As a joiner, touch memory while the others still train without this worker, not while they wait for it."""
        expected = self.session.expected
        if expected is None:
            return
        self._watch.rely_on_members()
        prewarm_devices(self.state.devices)
        num_leaves = expected.size if self.settings.is_fast else self.plan.num_shards
        for gradients, optimizer in zip(self._gradients, self.optimizers, strict=True):
            plan = gradients.begin(num_leaves, ranges(num_leaves, expected.size)[expected.rank])
            self._buffers.begin(plan)
            prewarm_optimizer(optimizer)

    @property
    def _num_turns(self) -> int:
        """The number of iterations of each batch: one for each optimizer."""
        return len(self.optimizers)

    @property
    def _has_begun(self) -> bool:
        return self.newest is not None and self.newest.number == self.iteration and self.newest.has_begun

    @property
    def _is_comparison_due(self) -> bool:
        """Whether all workers compare what they compute in the next iteration, which is rare."""
        starts = self._position.sample == 0 and is_compared_in_epoch(self._position.epoch)
        return starts or is_compared_iteration(self.iteration // self._num_turns)

    @property
    def _compares_state(self) -> bool:
        """Whether the parts of the state are compared before the next iteration: alike on all members."""
        return self._position.sample == 0 or is_compared_iteration(self.iteration // self._num_turns)

    def _may_update(self) -> bool:
        return self.newest is None or self.newest.is_exchanged or not self.newest.has_begun

    def _on_load(self) -> None:
        self._buffers.adopt()
        self.received.on_load()

    def _header(self, num_exchanges: int, *, compares_state: bool, is_new: bool) -> RoundHeader:
        """The header of the iteration's first round or, in a closure, of the one after ``num_exchanges``."""
        facts = self._watch.facts(
            self._buffers, self.iteration, num_exchanges, compares_state=compares_state and not num_exchanges
        )
        facts |= self._source.facts_of_batch()
        return self._protocol.header(next_iteration=self.iteration + 1, facts=facts, is_new=is_new)

    def _count_iterations(self) -> None:
        """Find out how many iterations there will be, now that the next batch is known."""
        progress = self.state.progress
        end = self._schedule.iterations_total(self.iteration, self.plan, self._position, epochs=self.settings.epochs)
        num_batches = end - self.iteration
        total = self.iteration + num_batches * self._num_turns - progress.turn
        progress.iterations_total = min(total, self.settings.max_iterations or total)


LONE_SAMPLE = (
    "the last batch of an epoch would have one sample, which joins the batch before it: set drop_last to leave it out, "
    'or let the body of the loop run once for each batch, by prepare(..., body="batch"), where it is a batch of its own'
)
SEVERAL_OPTIMIZERS = (
    "the body of the loop runs once for each of the {number} optimizers, and so computes again, after the step of one, "
    "what plain PyTorch has computed before it, such as the samples of a generator. By prepare(..., "
    'body="batch") it runs once for each batch'
)
