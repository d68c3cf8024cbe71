"""A training run on one worker whose body runs once for each batch: what it owns, and what happens in an iteration.

The rounds of an iteration are those of the calls of divided models in its body, forward and backward. A member that is
lost in one of them is replaced within it: the others compute its shards. Members join and leave between iterations.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from resile_shared.errors import ResileError

from ...checkpoint.checkpointer import Checkpointer
from ...collectives.tree import ranges
from ...messages import Ready
from ...session import Session, current_session
from ...state.facts import Facts
from ...state.optimizer import OptimizerState
from ...state.run import RunState, Stateful
from ..attributes import ScriptAttributes
from ..base_run import BaseRun
from ..batch_schedule import BatchSchedule
from ..buffers import Buffers
from ..data.batches import Batch, BatchPlan, Indices, Position, default_num_shards
from ..data.stream_reader import is_stream
from ..determinism import Determinism, Reproducibility, deterministic
from ..digest import RollingDigest
from ..gradients import check_shapes
from ..header import NO_INDICES, ComputedShards, RoundHeader
from ..protocol import TrainingProtocol
from ..received import ReceivedState
from ..repeated_call import notes_of_call
from ..replay import RepeatedRounds
from ..rounds import RoundResult
from ..seeds import mix, seed_all
from ..settings import TrainingSettings, facts_of
from ..stragglers import Pace
from .accumulated import AccumulatedGradients
from .comparison import Comparison
from .division import Division, KnownModels
from .reading import DatasetBatches, OwnRows, Read, StreamBatches, WholeBatch, plan_bodies
from .rows import Cut, cut_into
from .variables import LoopVariables


class BodyIteration:
    """One batch, and the rounds that the body of the loop has run for it."""

    def __init__(
        self,
        number: int,
        position: Position,
        read: Callable[[], Read],
        *,
        num_before: int,
    ) -> None:
        self.number = number
        self.epoch = position.epoch
        """The epoch, from 0."""
        self.num_before = num_before
        """How many batches of its epoch come before it."""
        self.next: Position | None = None
        """Where the next batch begins, if the script has decided it."""
        self._read = read
        self.num_calls = 0
        self.newest: RoundResult | None = None
        self.fetched: Indices = NO_INDICES
        """What all members have fetched for it."""
        self.loss: float | None = None
        self.seconds = [0.0, 0.0, 0.0]
        """In data, compute and callback."""
        self.processor = time.process_time()

    @cached_property
    def _content(self) -> Read:
        """Read when the script asks for its first batch, since it may change its dataset before."""
        return self._read()

    @property
    def batch(self) -> Batch:
        """What is counted when it is committed."""
        return self._content[0]._replace(next=self.next) if self.next else self._content[0]

    @property
    def samples(self) -> WholeBatch | OwnRows:
        """What the body gets."""
        return self._content[1]

    @property
    def begins_epoch(self) -> bool:
        """Whether it is the first of its epoch."""
        return self.num_before == 0

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last of its epoch."""
        return self.batch.ends_epoch


class BodyRun(BaseRun):
    """One training run of ``models``. Raises UsageError for settings that cannot work."""

    def __init__(
        self,
        models: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        dataset: Any,
        settings: TrainingSettings,
        *,
        variables: LoopVariables,
    ) -> None:
        self.model = models
        self.settings = settings
        self.session: Session = current_session()
        self.buffers = Buffers(models)
        self._dataset = dataset
        self._batches: DatasetBatches | StreamBatches
        if is_stream(dataset):
            self._batches = StreamBatches(dataset, settings, position=lambda: self._position)
            self.num_shards = settings.num_shards or default_num_shards(settings.batch_size)
        else:
            self._batches = DatasetBatches(dataset, plan_bodies(dataset, settings), settings, held=self._held_rows)
            self.num_shards = settings.num_shards or self.plan.num_shards
        self._open: BodyIteration | None = None
        self._reproducibility = Reproducibility(settings.mode, caveats=self.session.caveats)
        self._determinism: Determinism | None = None
        self._schedule = BatchSchedule(
            self.plan.batch_size,
            None,
            replayed=self.session.batches,
            has_fixed_length=self._batches.has_known_length,
        )
        check_shapes(models.parameters())
        self._digest = RollingDigest(list(models.parameters()))
        self.accumulated = AccumulatedGradients([each for each in models.parameters() if each.requires_grad])
        self._ledger = self._batches.ledger()
        self._known = KnownModels()
        self._comparison = Comparison(models, optimizers, settings.state, self.buffers)
        self._attributes = ScriptAttributes(models, optimizers)
        self._variables = variables
        self._received = ReceivedState(
            models,
            optimizers,
            self._attributes,
            settings.state,
            iteration=lambda: self.iteration,
            has_begun_iteration=lambda: False,
        )
        self.state = RunState(models, self._parts(optimizers), settings.state, after_load=self._on_load)
        self._checkpoints = Checkpointer(self.session, every=settings.checkpoint_every)
        self.rounds = RepeatedRounds(
            self.session, self.buffers, lambda: self.state.progress, recovering=self._recovering
        )
        self._protocol = TrainingProtocol(
            self.session,
            self,
            self.state,
            ledger=self._ledger,
            rounds=self.rounds,
            checkpoints=self._checkpoints,
            schedule=self._schedule,
        )
        each = models if isinstance(models, nn.ModuleList) else [models]
        self._divisions = [Division(model, self, self._known, number=number) for number, model in enumerate(each)]
        self._count_iterations(0, Position())

    def iterations(self) -> Generator[BodyIteration, None, None]:
        """Take part in the run to its end: yield each iteration, which is committed when the next one is asked for."""
        self._notes = notes_of_call()
        with ExitStack() as stack:
            self._determinism = stack.enter_context(deterministic(self._reproducibility, threads=self.settings.threads))
            stack.callback(self._checkpoints.close)
            for division in self._divisions:
                stack.callback(division.close)
            self.state.facts = self._facts()
            self._comparison.begin()
            try:
                yield from self._protocol.run(self._ready(), self._iterate)
            except ResileError as error:
                self.session.failure = error
                raise

    def _iterate(self) -> Iterator[BodyIteration]:
        self._warn_of_notes()
        phases, position = self.session.phases, self._position
        num_before = position.sample // self.plan.batch_size
        self._open = opened = BodyIteration(self.iteration, position, self._read, num_before=num_before)
        assert self._determinism is not None
        self._determinism.begin_iteration()
        self._comparison.begin_iteration(self.iteration, self._position, self.session.view)
        self.accumulated.begin_iteration()
        self._received.open_iteration(is_in_epoch=not opened.begins_epoch)
        phases.enter("callback")
        yield opened
        phases.enter("waiting")
        if self.iteration == self.iterations_total:  # the script has ended the run before this iteration
            return
        if opened.newest is None:
            self._exchange_headers()
        self._comparison.end_iteration(self.session.view)
        if (message := self._batches.close(opened.samples)) and not self._known.undivided:
            self.warn(message)
        assert opened.newest is not None
        newest = replace(opened.newest, totals=replace(opened.newest.totals, indices=opened.fetched))
        self._protocol.commit_body(opened.batch, newest, loss=opened.loss)

    def _read(self) -> Read:
        """Read the batch of the open iteration."""
        self.session.phases.enter("data")
        batch, samples = self._batches.read(self._position)
        if not self._batches.has_known_length:
            self._count_iterations(self.iteration, self._position)
        self.session.phases.enter("callback")
        return batch, samples

    def _held_rows(self, num_rows: int) -> slice | None:
        """The rows of this worker's shards in a batch, those of the first one if it has none; None if it is alone."""
        rank, size = self.place()
        cut = cut_into(num_rows, self.num_shards)
        held = cut.held_by(rank, size)
        return None if size == 1 else held if held.start < held.stop else cut.rows(0)

    def _no_shards(self) -> ComputedShards:
        self.rounds.open(0)
        return ComputedShards()

    def exchange(
        self, compute: Callable[[], ComputedShards], facts: Callable[[], Facts], *, sums_of: object
    ) -> RoundResult:
        """Take part in a round of the open iteration. See `Exchanging`."""
        if sums_of is not None and self.rounds.sums_of is sums_of:
            self._exchange_headers()  # a member may still lack the newest sums, which would be overwritten
        result = self._exchange(compute, facts)
        self.rounds.sums_of = sums_of
        return result

    def _exchange_headers(self) -> None:
        self._exchange(self._no_shards, dict)

    def _exchange(self, compute: Callable[[], ComputedShards], facts: Callable[[], Facts]) -> RoundResult:
        opened, phases = self._open, self.session.phases
        assert opened is not None

        def with_pace() -> ComputedShards:
            phases.enter("compute")
            self._attributes.close()
            computed = compute()
            self._attributes.open()
            phases.enter("waiting")
            return computed._replace(
                pace=self._pace(opened),
                indices=self._own_indices(opened),
                operations=self._reproducibility.operations,
            )

        is_first = opened.newest is None
        result = self.rounds.exchange(
            with_pace,
            lambda: self._header(facts(), is_first=is_first),
            next_iteration=self.iteration + 1,
            holds=True,
        )
        if is_first:
            opened.fetched = result.totals.indices
            self._comparison.on_first_round(result, self.session.view)
        opened.newest = result
        self._reproducibility.agree(result.totals.operations)
        self._protocol.on_call(result)
        phases.enter("callback")
        return result

    def _header(self, facts: Facts, *, is_first: bool) -> RoundHeader:
        if is_first:
            facts = facts | self._batches.facts() | self._comparison.facts()
        is_new = is_first and self._comparison.is_new
        header = self._protocol.header(next_iteration=self.iteration + 1, facts=facts, is_new=is_new)
        return replace(header, asks_for_boundary=self.session.has_change(self.iteration + 1))

    def _own_indices(self, opened: BodyIteration) -> Indices:
        """The samples that this worker counts in the iteration's first round: those of its shards."""
        if opened.newest is not None:
            return NO_INDICES
        rank, size = self.place()
        rows = cut_into(len(opened.samples), self.num_shards).held_by(rank, size)
        return opened.samples.indices(rows) if rows.start < rows.stop else NO_INDICES

    def _pace(self, opened: BodyIteration) -> Pace:
        taken = self.session.phases.take_seconds(("data", "compute", "callback"))
        opened.seconds = [before + now for before, now in zip(opened.seconds, taken, strict=True)]
        rank, size = self.place()
        held = ranges(self.num_shards, size)[rank]
        data, compute, callback = opened.seconds
        processor = time.process_time() - opened.processor
        return Pace(held.hi - held.lo, data, compute, processor, callback, *self._protocol.reports.last)

    @property
    def plan(self) -> BatchPlan:
        """The batches of an epoch."""
        return self._batches.plan

    @property
    def models_in_full(self) -> dict[str, nn.Module]:
        """The models that each worker computes in full, by their numbers."""
        return {str(number): self._divisions[number].model for number in sorted(self._known.undivided)}

    @property
    def recomputes(self) -> bool:
        """Whether shards are computed again for their backward pass."""
        return self.settings.recompute

    @property
    def num_samples(self) -> int:
        """The number of samples of the open batch."""
        assert self._open is not None
        return len(self._open.samples)

    def place(self) -> tuple[int, int]:
        """Return the rank of this worker, and the number of workers."""
        view = self.session.view
        return view.rank, view.size

    def sent_with_outputs(self, cut: Cut) -> OwnRows | None:
        """See `Exchanging`: what the first call with the rows of the batch sends."""
        assert self._open is not None
        samples, is_first = self._open.samples, self._open.num_calls == 1
        return samples if is_first and isinstance(samples, OwnRows) and cut.num_rows == len(samples) else None

    def next_seed(self) -> int:
        """Return a seed for the next call of the open iteration."""
        assert self._open is not None
        self._open.num_calls += 1
        return mix(self.settings.seed, "call", self.iteration, self._open.num_calls)

    def stop_before(self) -> None:
        """End the run before the open iteration, of which the script has seen nothing, on all workers alike."""
        self.state.progress.iterations_total = self.iteration

    @property
    def compares_first_shard(self) -> bool:
        """See `Exchanging`."""
        assert self._open is not None
        return self._comparison.computes_first_shard and self._open.num_calls == 1

    def computing(self) -> AbstractContextManager[None]:
        """See `Exchanging`."""
        assert self._determinism is not None
        self._determinism.apply()
        return self._comparison.computing()

    def computing_gradients(self, outputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """See `Exchanging`."""
        assert self._determinism is not None
        return self._determinism.backward(*outputs)

    def end_epoch(self) -> None:
        """The script has ended its loop over the batches of an epoch: the others of that epoch are left out."""
        opened = self._open
        assert opened is not None
        if opened.ends_epoch or opened.number + 1 == self.iterations_total:
            return
        opened.next = Position(opened.epoch + 1, 0)
        self._batches.restart()
        self._count_iterations(opened.number + 1, opened.next)

    def _count_iterations(self, iteration: int, position: Position) -> None:
        """Find out how many iterations there will be, if ``iteration`` begins at ``position``."""
        total = iteration + self.plan.num_batches(position, epochs=self.settings.epochs)
        self.state.progress.iterations_total = min(total, self.settings.max_iterations or total)

    def begin_script(self) -> None:
        """The script goes on from here: on a worker that was behind, with what it has on the others."""
        self._received.begin_iteration()
        self._attributes.begin()
        for message in self._attributes.warnings():
            self.warn(message)
        self._variables.begin()
        self._variables.restore()

    def begin_body(self) -> None:
        """The body begins with the batch: what it draws is the same on all workers, and on one that joins."""
        seed_all(mix(self.settings.seed, "body", self.iteration))

    def digest(self, round_: int) -> int:
        """A check of the parameters with which round ``round_`` begins, to be compared with the other members'."""
        return self._digest.at(round_)

    def discard_round(self) -> None:
        """Nothing to undo: rounds are repeated."""

    def begin_membership(self) -> None:
        """The next call is divided among other workers."""

    def state_facts(self) -> Facts:
        """The parts of the script's state."""
        return self._comparison.parts()

    def _on_load(self) -> None:
        self.buffers.adopt()
        self._received.on_load()

    def _recovering(self, lost: Any, recover: Callable[[], bool]) -> bool:
        return self._protocol.recovering(lost, recover)

    def _parts(self, optimizers: Sequence[torch.optim.Optimizer]) -> Mapping[str, Stateful]:
        numbered = enumerate(map(OptimizerState, optimizers))
        return {
            **{f"optimizer {number}" if number else "optimizer": each for number, each in numbered},
            **self._batches.parts,
            "ledger": self._ledger,
            "reproducibility": self._reproducibility,
            "batches": self._schedule,
            "gradients": self.accumulated,
            "attributes": self._attributes,
            "received": self._received,
            "variables": self._variables,
            "known models": self._known,
        }

    def _facts(self) -> Facts:
        return facts_of(
            {
                **self.settings.facts(self.plan),
                "num_shards": self.num_shards,
                "body": "batch",
                "packages": self.session.packages,
            },
            model=self.model,
            dataset=self._dataset,
            num_validation_samples=0,
            is_fast=self.settings.is_fast,
            known_probes=self.session.known_probes,
        )

    def _ready(self) -> Ready:
        return Ready(
            worker=0,
            iterations_total=self.iterations_total,
            num_shards=self.num_shards,
            batch_size=self.plan.batch_size,
            batch_range=None,
            epochs=self.settings.epochs,
            samples=self.plan.num_samples,
            bits=self.reproducibility,
            has_fixed_length=self._schedule.has_fixed_length,
            micro_batch_size=None,
        )
