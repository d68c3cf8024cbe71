"""The hand-written loop: the user's own training step, made elastic.

It reads as any training loop does::

    loop = ElasticLoop(model, optimizer, dataset, epochs=3, batch_size=192)
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(F.cross_entropy(model(inputs), targets))
        if iteration.exchange():
            optimizer.step()
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from resile_shared.errors import ResileError, UsageError

from ..checkpoint.checkpointer import Checkpointer
from ..collectives.spec import OtherRound
from ..collectives.tree import ranges
from ..messages import Ready, Warned
from ..session import LEFT, Session, current_session
from ..state.facts import Facts
from ..state.run import RunState, Stateful
from .attributes import ScriptAttributes
from .batch_schedule import BatchSchedule, declared_range
from .buffers import Buffers
from .closures import ClosureSteps
from .data.batch_samplers import BatchSampler
from .data.batches import BatchPlan, Position
from .data.fetch import Collate
from .data.samplers import Sampler, order_digest
from .data.sources import open_source
from .determinism import Determinism, Reproducibility, deterministic
from .digest import RollingDigest, params_sha256
from .gradients import gradients_of
from .header import RoundHeader
from .iteration import Iteration
from .learning_rate import LearningRateRule, LearningRateScale
from .leaving import Departure
from .noise import NoiseScale
from .prewarm import prewarm_devices, prewarm_optimizer
from .protocol import TrainingProtocol
from .received import ReceivedState
from .reports import Result
from .rounds import Rounds
from .scalers import prepared_scalers
from .seeds import mix, seed_all
from .settings import Mode, TrainingSettings, facts_of
from .validation import Validation, open_validator
from .watch.optimizer_watch import optimizer_parts
from .watch.repeatability import NewMembers, is_compared_in_epoch, is_compared_iteration
from .watch.script_watch import ScriptWatch


class ElasticLoop:
    """Iterates over the committed iterations of a run, on however many workers it has at the moment.

    ``dataset`` is map-style, or a stream: an iterable (see `StreamReader`). ``batch_size`` is the global batch, always
    cut into ``num_shards`` shards (None: see `default_num_shards`). ``batch_range``, the least and the most samples,
    lets the pool change the global batch between iterations; ``learning_rate_rule`` says how learning rates follow it
    ("linear", "sqrt" or "none"), relative to ``batch_size``. In fast mode ``micro_batch_size`` is the most samples of
    one forward and backward pass: a worker computes a larger share of the batch in several. ``state`` names further
    objects with ``state_dict`` and ``load_state_dict`` that belong to the run's state, such as a learning-rate schedule
    or a GradScaler. ``validation`` is computed at the end of each epoch. ``checkpoint_every`` counts iterations, or is
    a time such as "5 min". ``threads`` are torch's threads in each worker. Without ``shuffle`` every epoch has the
    order of the dataset; ``drop_last`` leaves out samples that do not fill a global batch. ``sampler`` draws the
    indices of each epoch instead (see `SamplerOrder`), ``batch_sampler`` those of each global batch, whatever their
    number (see `BatchOrder`). ``max_iterations`` ends the run earlier than ``epochs`` do. Raises UsageError for
    settings that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        dataset: Any,
        *,
        epochs: int = 1,
        batch_size: int = 64,
        batch_range: tuple[int, int] | None = None,
        learning_rate_rule: LearningRateRule = "linear",
        num_shards: int | None = None,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        validation: Validation | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        checkpoint_every: int | str | None = None,
        mode: Mode = "same-bits",
        micro_batch_size: int | None = None,
        threads: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Sampler | None = None,
        batch_sampler: BatchSampler | None = None,
        max_iterations: int | None = None,
    ) -> None:
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._shards = open_source(
            dataset,
            batch_size=batch_size,
            batch_range=batch_range,
            num_shards=num_shards,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            num_turns=self._num_turns,
            is_fast=mode == "fast",
            micro_batch_size=micro_batch_size,
            position=lambda: self._position,
        )
        plan = self._shards.plan
        batch_size, shards = plan.batch_size, plan.num_shards
        self._settings = TrainingSettings(
            epochs, batch_size, shards, seed, mode, threads, shuffle, drop_last, batch_range, learning_rate_rule
        )
        self._more_settings: dict[str, object] = {"sampler": order_digest(plan), "max_iterations": max_iterations}
        self._max_iterations = max_iterations
        self.bits = Reproducibility(mode)
        self._session: Session = current_session()
        declared = declared_range(batch_range, num_shards=shards) if batch_range else None
        has_fixed_length = batch_range is None and self._shards.has_known_length
        self._schedule = BatchSchedule(
            batch_size, declared, replayed=self._session.batches, has_fixed_length=has_fixed_length
        )
        self._phases = self._session.phases
        self._model = model
        self._dataset = dataset
        self._entered = False
        self._left: Iterator[Iteration]
        """The iterations that follow once the script has left the loop."""
        self._departure = Departure(
            model, loop="the iterations", owner="loop", held="`it = iter(loop)`: write `for iteration in loop:`"
        )
        self._determinism: Determinism
        self._parameters = list(model.parameters())
        self._gradients = gradients_of(self._optimizers, self._parameters)
        self._noise = NoiseScale()
        self._buffers = Buffers(model)
        self._digest = RollingDigest(self._parameters)
        # With a batch that changes, there may be more iterations than a schedule was made for.
        self._watch = ScriptWatch(model, self._optimizers, state or {}, mode=mode, has_fixed_length=has_fixed_length)
        self._open: Iteration | None = None
        self.closures = ClosureSteps(self._optimizers, self._watch.optimizers, self._buffers, lambda: self._open)
        self._new_members = NewMembers()
        self._last_members: tuple[int, ...] = ()
        """The members of the newest iteration that was committed on this worker."""
        self._checkpoints = Checkpointer(self._session, every=checkpoint_every)
        self.attributes = ScriptAttributes(model, self._optimizers)
        self.received = ReceivedState(
            model,
            self._optimizers,
            self.attributes,
            state or {},
            iteration=lambda: self.iteration,
            has_begun_iteration=lambda: self._has_begun,
        )
        self.has_epochs = False
        """Whether the script also has code at the start of each epoch: see `ElasticLoader`."""
        self._validator = open_validator(
            validation, model, plan, seed=seed, buffers=self._buffers, attributes=self.attributes
        )
        if validation and validation.selection:
            self._more_settings["selection"] = validation.selection
        if batch_range:
            for each in self._optimizers:
                LearningRateScale(each, learning_rate_rule, lambda: self.plan.batch_size / batch_size)
        self._scalers = prepared_scalers(state or {}, self._parameters)
        ledger = self._shards.ledger()
        parts: dict[str, Stateful] = {
            **optimizer_parts(self._optimizers, self._watch.optimizers),
            "ledger": ledger,
            "reproducibility": self.bits,
            "batches": self._schedule,
            "noise": self._noise,
            "attributes": self.attributes,
            "received": self.received,
            **self._shards.parts,
            **({"validation": self._validator} if self._validator else {}),
        }
        self._state = RunState(model, parts, state or {}, after_load=self._on_load)
        self._count_iterations()
        self._protocol = TrainingProtocol(
            self._session,
            _Computation(self),
            self._state,
            ledger=ledger,
            rounds=Rounds(self._session, self._buffers),
            checkpoints=self._checkpoints,
            schedule=self._schedule,
            validator=self._validator,
        )

    @property
    def plan(self) -> BatchPlan:
        """The batches of an epoch."""
        return self._shards.plan

    @property
    def epochs(self) -> int:
        """The number of passes over the dataset."""
        return self._settings.epochs

    @property
    def iteration(self) -> int:
        """Iterations committed so far: the number of the next one."""
        return self._state.progress.iteration

    @property
    def iterations_total(self) -> int:
        """The number of iterations after which the run ends; an estimate if the batch may change."""
        return self._state.progress.iterations_total

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the open iteration; between iterations and after the end, that of the newest one."""
        progress = self._state.progress
        is_open = self._open is not None and self._open.number == progress.iteration
        return progress.epoch if is_open else progress.last_epoch

    @property
    def loss(self) -> float | None:
        """The loss of the last committed iteration, over its global batch; None before the first."""
        return self._state.progress.loss

    @property
    def result(self) -> Result | None:
        """How the run ended; None before its end."""
        self.complete_if_left()
        return self._protocol.result

    @property
    def validation(self) -> Mapping[str, float]:
        """The scores of the last validation that was completed."""
        return self._state.progress.validation

    @property
    def is_lowest_rank(self) -> bool:
        """Whether this worker is, at the moment, the one that reports and writes files."""
        self.complete_if_left()
        return self._session.view.rank == 0

    def require_equal(self, **settings: object) -> None:
        """Before the loop: name further settings of the script that must be equal on all workers of the run."""
        self._more_settings |= settings

    def stop(self) -> None:
        """End the run after this iteration. All workers must decide so at the same one.

        Judge by the reduced loss or metrics.
        """
        if not self._protocol.result:  # of others, for a worker that was behind at the end
            self._state.progress.iterations_total = self.iteration + 1

    def stop_before(self) -> None:
        """End the run before the open iteration, before any of its shards was taken, on all workers alike."""
        self._state.progress.iterations_total = self.iteration

    @property
    def missing_gradients(self) -> str:
        """See `PreparedLoop`."""
        if self._open is None or not self._open.has_begun or self._open.is_exchanged:
            return ""
        return "an ElasticLoop has gradients after iteration.exchange(): write the lines that use them below it"

    def complete_if_left(self) -> None:
        """See `PreparedLoop`."""
        if self._departure.has_left and self._open and (not self._open.has_begun or self._open.is_complete):
            self.complete()

    def complete(self) -> None:
        """See `PreparedLoop`."""
        if self._protocol.result:
            return
        if self._open is None:
            raise UsageError(LEFT)
        self._open.raise_refusal()
        if self._open.has_begun and not self._open.is_complete:
            raise UsageError(
                f"the loop was left in the middle of iteration {self._open.number}, where each worker has seen other "
                "batches: leave it after `if iteration.exchange(): optimizer.step()`, at the same iteration on all "
                "workers, by iteration.loss or another value of the whole global batch"
            )
        self._departure.begin_completion()
        if self._open.has_begun:
            self.stop()
        else:
            self.stop_before()
        following = next(self._left, None)
        self._departure.close()
        if following is not None:  # a member that has not left the loop handed its state over in a recovery
            raise OtherRound("another worker")

    def __iter__(self) -> Iterator[Iteration]:
        """Yield the iterations of the run. A script that leaves them by ``break`` ends the run: see `Departure`."""
        self._left = self.iterations()
        current_session().prepared = self
        for iteration in self._left:
            try:
                yield iteration
            except GeneratorExit:
                self._departure.leave()
                raise

    def iterations(self) -> Iterator[Iteration]:
        """Yield the iterations for a loop that is not left before its end, such as that of a library with callbacks."""
        if self._entered:
            raise UsageError(
                "this loop has run already: a script has one training call; raise `epochs` to train longer"
            )
        self._entered = True
        with ExitStack() as stack:
            self._determinism = stack.enter_context(deterministic(self.bits, threads=self._settings.threads))
            stack.callback(self._checkpoints.close)
            stack.callback(self._shards.restart)
            stack.enter_context(self._watch.watching(self._may_update))
            self._state.facts = facts_of(
                self._settings,
                {**self._more_settings, "packages": self._session.packages},
                model=self._model,
                dataset=self._dataset,
                num_validation_samples=self._validator.num_samples if self._validator else 0,
                known_probes=self._session.known_probes,
            )
            if self._session.expected:
                self._watch.rely_on_members()
            self._prewarm()
            try:
                yield from self._protocol.run(self._ready(), self._iterate)
            except ResileError as error:
                self._session.failure = error
                raise

    def _ready(self) -> Ready:
        return Ready(
            worker=0,
            iterations_total=self.iterations_total,
            num_shards=self.plan.num_shards,
            batch_size=self._settings.batch_size,
            batch_range=None if self._session.batches else self._schedule.batch_range,
            epochs=self.epochs,
            samples=self.plan.num_samples,
            bits=str(self.bits),
            has_fixed_length=self._schedule.has_fixed_length,
            micro_batch_size=self.plan.micro_batch_size,
        )

    def _prewarm(self) -> None:
        """As a joiner, touch memory while the others still train without this worker, not while they wait for it."""
        expected = self._session.expected
        if expected:
            prewarm_devices(self._state.devices)
            num_leaves = expected.size if self._settings.mode == "fast" else self.plan.num_shards
            for gradients, optimizer in zip(self._gradients, self._optimizers, strict=True):
                plan = gradients.begin(num_leaves, ranges(num_leaves, expected.size)[expected.rank])
                self._buffers.begin(plan)
                prewarm_optimizer(optimizer)

    def _iterate(self) -> Iterator[Iteration]:
        self._watch.check_unchanged(
            epochs=self.epochs, iteration=self.iteration, iterations_total=self.iterations_total
        )
        view, position, turn = self._session.view, self._position, self._state.progress.turn
        self._shards.resize(self._schedule.next(self.iteration, ordered=view.batch_size))
        self._phases.enter("data")
        batch = self._shards.batch(position, view)
        held = batch.held_by(view.rank, view.size)
        self._count_iterations()
        is_due, has_same_bits = self._is_comparison_due, self._settings.mode != "fast"
        are_all_compared = has_same_bits and is_due
        is_compared = has_same_bits and (is_due or self._new_members.takes_part(view))
        self._watch.begin_iteration(is_compared=are_all_compared)
        self._buffers.begin_iteration(compares_values=is_due or view.workers != self._last_members)
        self._open = iteration = Iteration(
            self.iteration,
            batch,
            held,
            batch.leaves_of(view.rank, view.size),
            seed=self._settings.seed,
            fetch=partial(self._shards.next_shard, position, turn, view),
            fetch_again=partial(self._shards.read_again, batch),
            keeps_shards=self.closures.are_used,
            gradients=self._gradients[turn],
            buffers=self._buffers,
            rounds=self._protocol.rounds,
            phases=self._phases,
            scalers=self._scalers,
            determinism=self._determinism,
            header=partial(
                self._header,
                compares_state=self._compares_state,
                is_new=self._new_members.is_new and held.hi > held.lo,
            ),
            last=self._protocol.reports.last,
            measures_noise=batch.measures_noise and turn == 0,
            turn=turn,
            num_turns=self._num_turns,
            is_compared=is_compared,
            watch=self._watch.body,
            on_begin=self._on_begin,
            on_exchange=self._on_exchange,
            on_lost=self._on_lost,
        )
        steps = self._watch.steps[turn]
        self.received.open_iteration(is_in_epoch=self.has_epochs and (position.sample > 0 or turn > 0))
        self.attributes.begin()
        self._phases.enter("callback")
        yield iteration
        self._phases.enter("waiting")
        if self.iteration == self.iterations_total:
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

    @property
    def _is_comparison_due(self) -> bool:
        """Whether all workers compare what they compute in the next iteration, which is rare."""
        starts = self._position.sample == 0 and is_compared_in_epoch(self._position.epoch)
        return starts or is_compared_iteration(self.iteration // self._num_turns)

    def _on_load(self) -> None:
        self._buffers.adopt()
        self.received.on_load()

    def _on_begin(self) -> None:
        self.received.begin_iteration()
        self.attributes.close()
        for text in self.attributes.warnings():
            if self._session.view.rank == 0:
                self._session.report(Warned(worker=self._session.view.me, message=text))
        self._buffers.adopt_changed()

    def _on_exchange(self) -> None:
        self._state.note_modes()
        self.attributes.open()

    def _on_lost(self) -> None:
        if not self.has_epochs:
            self._buffers.restore()
            self.received.abandon_iteration()

    @property
    def _has_begun(self) -> bool:
        return self._open is not None and self._open.number == self.iteration and self._open.has_begun

    def _may_update(self) -> bool:
        return self._open is None or self._open.is_exchanged or not self._open.has_begun

    @property
    def _compares_state(self) -> bool:
        """Whether the parts of the state are compared before the next iteration: alike on all members."""
        return self._position.sample == 0 or is_compared_iteration(self.iteration // self._num_turns)

    def _header(self, num_exchanges: int, *, compares_state: bool, is_new: bool) -> RoundHeader:
        """The header of the iteration's first round or, in a closure, of the one after ``num_exchanges``."""
        facts = self._watch.facts(
            self._buffers, self.iteration, num_exchanges, compares_state=compares_state and not num_exchanges
        )
        facts |= self._shards.facts_of_batch()
        return self._protocol.header(next_iteration=self.iteration + 1, facts=facts, is_new=is_new)

    def _count_iterations(self) -> None:
        """Find out how many iterations there will be, now that the next batch is known."""
        progress = self._state.progress
        end = self._schedule.iterations_total(self.iteration, self.plan, self._position, epochs=self.epochs)
        num_batches = end - self.iteration
        total = self.iteration + num_batches * self._num_turns - progress.turn
        progress.iterations_total = min(total, self._max_iterations or total)

    @property
    def _num_turns(self) -> int:
        """The number of iterations of each batch: one for each optimizer."""
        return len(self._optimizers)

    @property
    def _position(self) -> Position:
        return Position(self._state.progress.epoch, self._state.progress.sample)


class _Computation:
    """What the protocol needs of a loop that trains a model: see `Computation`."""

    def __init__(self, loop: ElasticLoop) -> None:
        self._loop = loop
        self.model = loop._model

    @property
    def reproducibility(self) -> str:
        return str(self._loop.bits)

    @property
    def operations(self) -> tuple[str, ...]:
        return self._loop.bits.operations

    def digest(self, round_: int) -> int:
        return self._loop._digest.at(round_) ^ mix("steps", *self._loop._watch.steps, self._loop._schedule.current)

    def discard_round(self) -> None:
        self._loop._buffers.restore()
        self._loop.received.restore()

    def begin_membership(self) -> None:
        self._loop._shards.restart()

    def begin_iteration(self, iteration: int) -> None:
        seed_all(mix(self._loop._settings.seed, "between", iteration))

    def params_sha256(self) -> str:
        return params_sha256(self.model)

    def state_facts(self) -> Facts:
        return self._loop._watch.state_facts()
