"""The hand-written loop: the user's own training step, made elastic.

loop = ElasticLoop(model, optimizer, dataset, epochs=3, batch_size=192)
for iteration in loop:
for inputs, targets in iteration.shards():
iteration.backward(F.cross_entropy(model(inputs), targets))
if iteration.exchange():
optimizer.step()
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from resile_shared.errors import UsageError

from ..collectives.exchange import Abandoned
from ..collectives.tree import ranges
from ..messages import Completed, Joined, Progress, Ready, Switched
from .batches import Batch, BatchPlan, default_num_shards
from .buffers import Buffers
from .checkpoints import Checkpointer
from .determinism import Bits, deterministic, device_class
from .digest import RollingDigest, dataset_digest, params_sha256
from .fetch import Collate, Fetched, Fetcher, ShardKey, checked_dataset
from .gradients import Gradients
from .iteration import Iteration
from .ledger import Ledger
from .rehearsal import rehearse
from .reports import Reports
from .rounds import RoundResult, Rounds
from .runstate import RunState
from .seeds import mix, seed_all
from .session import Change, Session, current_session
from .validation import Validation, Validator

Mode = Literal["same-bits", "fast"]
CLOSING_SECONDS = 0.02
HOLDING_SECONDS = 0.1


@dataclass(frozen=True)
class Result:
    """How a training call ended."""

    params_sha256: str
    iterations: int
    samples_seen: int
    loss: float | None
    metrics: Mapping[str, float]
    validation: Mapping[str, float]
    bits: str


class ElasticLoop:
    """Iterates over the committed iterations of a run, on however many workers it has at the moment.

    ``dataset`` is map-style. ``batch_size`` is the global batch, always cut into ``num_shards`` shards (None: the
    largest of 24, 12, 8, 6, 4, 2, 1 that leaves at least 8 samples in a shard). ``state`` names further objects with
    ``state_dict`` and ``load_state_dict`` that belong to the run's state, such as a learning-rate schedule or a
    GradScaler. ``validation`` is computed at the end of each epoch. ``checkpoint_every`` counts iterations, or is a
    time such as "5 min". ``threads`` are torch's threads in each worker. Raises UsageError for settings that cannot
    work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        epochs: int = 1,
        batch_size: int = 64,
        num_shards: int | None = None,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        validation: Validation | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        checkpoint_every: int | str | None = None,
        mode: Mode = "same-bits",
        threads: int = 1,
    ) -> None:
        if epochs < 1:
            raise UsageError(f"epochs is {epochs}: use 1 or more")
        if mode not in ("same-bits", "fast"):
            raise UsageError(f'mode is {mode!r}: use "same-bits" or "fast"')
        num_samples = len(checked_dataset(dataset, name="training"))
        shards = default_num_shards(batch_size) if num_shards is None else num_shards
        self.plan = BatchPlan(num_samples, batch_size, shards, seed)
        self.epochs = epochs
        self.bits = Bits(mode)
        self.result: Result | None = None
        self._session: Session = current_session()
        self._model = model
        self._optimizer = optimizer
        self._dataset = dataset
        self._seed = seed
        self._mode = mode
        self._threads = threads
        self._entered = False
        self._parameters = list(model.parameters())
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._fetcher = Fetcher(dataset, seed=seed, collate_fn=collate_fn, num_workers=num_workers)
        self._stream: Iterator[Fetched] | None = None
        self._gradients = Gradients(parameters)
        self._buffers = Buffers(model)
        self._ledger = Ledger(num_samples)
        self._digest = RollingDigest(parameters)
        self._rounds = Rounds(self._session, self._buffers)
        self._checkpoints = Checkpointer(self._session, every=checkpoint_every)
        self._validator = (
            Validator(validation, model, batch_size=batch_size, num_shards=self.plan.num_shards, seed=seed)
            if validation
            else None
        )
        self._state = RunState(
            model, optimizer, state or {}, buffers=self._buffers, ledger=self._ledger, validator=self._validator
        )
        self._state.standing.iterations_total = epochs * self.plan.per_epoch
        self._reports = Reports(self._session)
        self._phases = self._session.phases

    @property
    def iteration(self) -> int:
        """Iterations committed so far: the number of the next one."""
        return self._state.standing.iteration

    @property
    def iterations_total(self) -> int:
        """The number of iterations after which the run ends."""
        return self._state.standing.iterations_total

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self.iteration // self.plan.per_epoch

    @property
    def validation(self) -> Mapping[str, float]:
        """The scores of the last validation that was completed."""
        return self._state.standing.validation

    @property
    def is_lowest_rank(self) -> bool:
        """Whether this worker is, at the moment, the one that reports and writes files."""
        return self._session.view.rank == 0

    def stop(self) -> None:
        """End the run after this iteration. All workers must decide so at the same one.

        Judge by the reduced loss or metrics.
        """
        self._state.standing.iterations_total = self.iteration + 1

    def __iter__(self) -> Iterator[Iteration]:
        if self._entered:
            raise UsageError(
                "this loop has run already: a script has one training call; raise `epochs` to train longer"
            )
        self._entered = True
        with ExitStack() as stack:
            stack.enter_context(deterministic(self.bits, threads=self._threads))
            stack.callback(self._checkpoints.close)
            self._enter()
            while self.result is None:
                try:
                    if self._state.standing.pausing:
                        self._hold()
                    elif self._validator and self._validator.under_way:
                        self._validate(self._validator)
                    elif self.iteration < self.iterations_total:
                        yield from self._iterate()
                    else:
                        self._finish()
                except Abandoned as lost:
                    self._recover(lost)

    # entering

    def _enter(self) -> None:
        """Become a member.

        As a founder with the script's or a checkpoint's state, or as a joiner with the state handed over.
        """
        self._state.facts = self._facts()
        self._prepare()
        ready = Ready(
            worker=0,
            iterations_total=self.iterations_total,
            num_shards=self.plan.num_shards,
            batch_size=self.plan.batch_size,
            epochs=self.epochs,
            samples=self.plan.num_samples,
            bits=str(self.bits),
        )
        if not self._session.join(ready, self._state):
            self._go_on_from_state()
            self._report_switch(0.0)
            return
        if self._session.resume:
            stored = self._checkpoints.newest(self._state)
            if stored:
                self._state.load(*stored)
                self._go_on_from_state()
        first = self._state.standing.round
        while self._state.standing.round == first:
            try:
                self._compare()
            except Abandoned as lost:
                self._recover(lost)

    def _compare(self) -> None:
        """Find out in the first round whether all founders begin with the same."""
        outcome = self._rounds.open(0).finish(
            next_iteration=self.iteration, digest=self._digest.at(0), facts=self._state.facts
        )
        self._report_switch(0.0)
        self._settle(outcome)

    def _prepare(self) -> None:
        """As a joiner, touch memory while the others still train without this worker, not while they wait for it."""
        expected = self._session.expected
        if expected:
            num_shards = expected.size if self._mode == "fast" else self.plan.num_shards
            self._gradients.begin(num_shards, ranges(num_shards, expected.size)[expected.rank])
            rehearse(self._optimizer)

    def _go_on_from_state(self) -> None:
        self._rounds.number = self._state.standing.round
        seed_all(mix(self._seed, "between", self.iteration))

    def _facts(self) -> dict[str, str]:
        """What must be equal on all members, by the name a user knows it by."""
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        settings = (self.plan.batch_size, self.plan.num_shards, self._seed, self._mode, self._threads)
        facts = {
            "dataset": dataset_digest(self._dataset),
            "initial model": params_sha256(self._model),
            "setting of the training call": repr(settings),
        }
        if self._mode == "same-bits":
            facts["class of device"] = device_class(device)
        return facts

    # the iterations

    def _iterate(self) -> Iterator[Iteration]:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if [parameter.requires_grad for parameter in self._parameters] != self._trainable:
            raise UsageError(
                "parameters were frozen or unfrozen after the training call began: a joining worker could not know; "
                "decide it before, or use parameter groups with a learning rate of 0"
            )
        view = self._session.view
        batch = self._batch(self.iteration)
        iteration = Iteration(
            self.iteration,
            batch,
            batch.held_by(view.rank, view.size),
            seed=self._seed,
            fetch=self._next_shard,
            gradients=self._gradients,
            buffers=self._buffers,
            rounds=self._rounds,
            phases=self._phases,
            last=self._reports.last,
        )
        iteration.header = {
            "next_iteration": self.iteration + 1,
            "digest": self._digest.at(self._rounds.number),
            **self._checkpoints.news(),
            "checkpoint": self._checkpoints.due(self.iteration + 1),
            "pause": self._session.pause_asked,
        }
        self._phases.enter("callback")
        yield iteration
        self._phases.enter("waiting")
        if iteration.lost:
            raise iteration.lost
        if iteration.outcome is None:
            raise UsageError(
                "the body of the loop ended without iteration.exchange(): call it once, after the last shard"
            )
        self._commit(batch, iteration)
        self._settle(iteration.outcome)

    def _batch(self, number: int) -> Batch:
        return self.plan.batch(number, num_shards=self._session.view.size if self._mode == "fast" else None)

    def _next_shard(self) -> Fetched:
        if self._stream is None:
            self._stream = self._fetcher.stream(self._upcoming())
        return next(self._stream)

    def _upcoming(self) -> Iterator[ShardKey]:
        """This worker's shards from here to the end, should the membership stay.

        After a change there is a new stream.
        """
        view = self._session.view
        for number in range(self.iteration, self.epochs * self.plan.per_epoch):
            batch = self._batch(number)
            for leaf in range(*batch.held_by(view.rank, view.size)):
                yield ShardKey(batch.epoch, batch.shard(leaf))

    def _commit(self, batch: Batch, iteration: Iteration) -> None:
        assert iteration.outcome is not None
        self._ledger.commit(batch.epoch, iteration.outcome.totals.indices)
        standing = self._state.standing
        standing.iteration += 1
        standing.loss, standing.metrics = iteration.loss, iteration.metrics
        seed_all(mix(self._seed, "between", self.iteration))
        ends_epoch = self.iteration % self.plan.per_epoch == 0 or self.iteration == self.iterations_total
        if ends_epoch and self._validator:
            self._validator.start()
            ends_epoch = False
        if self.is_lowest_rank:
            self._reports.committed(lambda: self._progress(ends_epoch=ends_epoch), always=ends_epoch)
        self._reports.measured(iteration.outcome)

    def _validate(self, validator: Validator) -> None:
        outcome = validator.run_batch(
            self._rounds,
            self._session.view,
            self._phases,
            next_iteration=self.iteration,
            digest=self._digest.at(self._rounds.number),
            news=self._checkpoints.news(),
        )
        standing = self._state.standing
        if not validator.under_way:
            standing.validation = validator.scores
            if self.is_lowest_rank:
                self._session.report(self._progress(ends_epoch=True))
        self._settle(outcome)

    # between two rounds

    def _settle(self, outcome: RoundResult) -> None:
        """What follows from the headers of a committed round: checkpoints, and changes of membership."""
        self._state.standing.round = self._rounds.number
        self._checkpoints.heard(outcome.headers)
        pauses = any(header.pause for header in outcome.headers)
        if pauses or outcome.headers[0].checkpoint:
            self._checkpoints.begin(self.iteration, self._state.flatten(), pauses=pauses)
        if pauses:
            if self.is_lowest_rank:
                self._session.report(self._progress())
            self._state.standing.pausing = True  # a joiner pauses too, but whoever resumes from the checkpoint does not
        change = self._session.agreed(outcome.named)
        if change:
            self._switch(change, outcome)

    def _switch(self, change: Change, outcome: RoundResult) -> None:
        begun = time.perf_counter()
        self._stream = None
        if self.is_lowest_rank:
            self._session.report(self._progress())
        self._session.switch(change, outcome.tag, self._state.flatten)
        self._checkpoints.redivide()
        self._report_switch(time.perf_counter() - begun)

    def _recover(self, lost: Abandoned) -> None:
        """Go on without whoever was lost: the round under way is done again, by the members of a newer generation."""
        begun = time.perf_counter()
        self._stream = None
        self._buffers.restore()  # before the state is given to anybody: the shards of the lost round have left theirs
        is_behind = self._session.recover(lost, standing=self._state.standing.round, state=self._state)
        self._go_on_from_state()
        self._checkpoints.recovered(is_behind=is_behind)
        self._report_switch(time.perf_counter() - begun)

    def _hold(self) -> None:
        """Store the checkpoint of a pause, and wait for the end that follows once it is known to be stored."""
        time.sleep(CLOSING_SECONDS if self._close() else HOLDING_SECONDS)

    def _finish(self) -> None:
        """Wait until checkpoints under way and the final model are stored, and say that training is complete."""
        self._checkpoints.store_model(self._model)
        while self._close():
            time.sleep(HOLDING_SECONDS if self._checkpoints.in_trouble else CLOSING_SECONDS)
            self._checkpoints.store_model(self._model)
        result = self._complete()
        self._close()  # whoever stored the model may be lost before it has said so: then somebody else does it again
        self.result = result
        self._session.complete()

    def _complete(self) -> Result:
        standing, bits = self._state.standing, str(self.bits)
        sha = params_sha256(self._model)
        if self.is_lowest_rank:
            completed = Completed(
                worker=self._session.view.me,
                generation=self._session.view.generation,
                iteration=standing.iteration,
                epoch=self.epoch,
                samples_seen=self._ledger.samples_seen,
                loss=standing.loss,
                metrics=standing.metrics,
                validation=standing.validation,
                params_sha256=sha,
                model=self._checkpoints.model_key,
                ledger=self._ledger.epochs(),
                bits=bits,
            )
            self._session.report(completed)
        return Result(
            params_sha256=sha,
            iterations=standing.iteration,
            samples_seen=self._ledger.samples_seen,
            loss=standing.loss,
            metrics=standing.metrics,
            validation=standing.validation,
            bits=bits,
        )

    def _close(self) -> bool:
        """A round without training; tells whether a member still waits for a checkpoint."""
        closing = self._rounds.open(0)
        outcome = closing.finish(
            next_iteration=self.iteration,
            digest=self._digest.at(self._rounds.number),
            **self._checkpoints.news(),
            busy=self._checkpoints.busy,
        )
        self._settle(outcome)
        return any(header.busy for header in outcome.headers)

    # reports

    def _report_switch(self, pause_seconds: float) -> None:
        view = self._session.view
        self._reports.members_changed()
        if view.rank != 0:
            self._session.report(Joined(worker=view.me, generation=view.generation, iteration=self.iteration))
            return
        message = Switched(
            worker=view.me,
            generation=view.generation,
            workers=view.workers,
            iteration=self.iteration,
            pause_seconds=pause_seconds,
        )
        self._session.report(message)

    def _progress(self, *, ends_epoch: bool = False) -> Progress:
        standing = self._state.standing
        return Progress(
            worker=self._session.view.me,
            generation=self._session.view.generation,
            iteration=standing.iteration,
            epoch=max(0, standing.iteration - 1) // self.plan.per_epoch,
            loss=standing.loss,
            metrics=standing.metrics,
            validation=standing.validation,
            iteration_seconds=self._reports.iteration_seconds,
            samples_seen=self._ledger.samples_seen,
            ends_epoch=ends_epoch,
        )
