"""The protocol of a run, whatever its rounds compute.

What a member does at the start, after each round, at a switch, after a loss, in a pause, and at the end.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

from torch import nn

from ..checkpoint.checkpointer import Checkpointer
from ..collectives.spec import Abandoned, Repeated
from ..membership.events import Switch
from ..messages import Ready
from ..session import Session
from ..state.facts import Facts
from ..state.run import RunState
from .batch_schedule import BatchSchedule
from .data.batches import Batch
from .data.ledger import Ledger
from .header import ComputedShards, RoundHeader
from .replay import RepeatedRounds
from .reports import Reports, Result
from .rounds import RoundResult, Rounds
from .validation import Validator

BUSY_SECONDS = 0.02
"""The time between two idle rounds while a checkpoint is being stored."""
IDLE_SECONDS = 0.1
"""The time between two idle rounds while the job is paused, or the storage fails."""

T = TypeVar("T")


class Computation(Protocol):
    """What the rounds of a run compute, as far as the protocol is concerned with it."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""

    @property
    def reproducibility(self) -> str:
        """Whether the parameters are the same bits in every run of this kind; if not, why."""

    def digest(self, round_: int) -> int:
        """A check of the parameters with which round ``round_`` begins, to be compared with the other members'."""

    def discard_round(self) -> None:
        """Undo what the abandoned round has changed."""

    def begin_membership(self) -> None:
        """From now on this worker holds other shards of each batch."""

    def begin_iteration(self, iteration: int) -> None:
        """The state before ``iteration`` is in place: it was committed, received or loaded."""

    @property
    def operations(self) -> tuple[str, ...]:
        """Operations without a deterministic form that this worker knows of."""

    def params_sha256(self) -> str:
        """The digest of the final parameters."""

    def state_facts(self) -> Facts:
        """What must be equal on all members beside the parameters: the parts of the script's own state."""


class TrainingProtocol:
    """One member's part in a run. ``result`` is its outcome once `run` has ended."""

    def __init__(
        self,
        session: Session,
        computation: Computation,
        state: RunState,
        *,
        ledger: Ledger,
        rounds: Rounds,
        checkpoints: Checkpointer,
        schedule: BatchSchedule,
        validator: Validator | None = None,
    ) -> None:
        self.rounds = rounds
        self.reports = Reports(session, state, ledger, schedule)
        self.result: Result | None = None
        self._session = session
        self._computation = computation
        self._state = state
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._schedule = schedule
        self._validator = validator
        self._is_checkpoint_due = False
        """Like the next: by the rounds of the open iteration, where its body runs several."""
        self._is_boundary_asked_for = False

    def run(self, ready: Ready, iterate: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Become a member and take part in all rounds to the end of the run; yields what ``iterate()`` yields.

        ``iterate`` computes one iteration and passes its outcome to `commit`. It raises Abandoned when a member was
        lost meanwhile, and is called again once the others have recovered.
        """
        self._start(ready)
        while self.result is None:
            try:
                if self._state.progress.pausing:
                    self._pause()
                elif self._validator and self._validator.in_progress:
                    self._validate(self._validator)
                elif self._state.progress.iteration < self._state.progress.iterations_total:
                    self.reports.on_begin()
                    yield from iterate()
                else:
                    self._finish()
            except Repeated:
                self._repeat()
            except Abandoned as lost:
                self._recover(lost)

    def header(
        self, *, next_iteration: int | None = None, facts: Facts | None = None, is_new: bool = False
    ) -> RoundHeader:
        """Build the header of the next round; ``next_iteration`` is the number of iterations after it, if it trains."""
        progress = self._state.progress
        return RoundHeader(
            digest=self._computation.digest(self.rounds.number),
            checkpoint=self._checkpoints.header_fields(
                next_iteration, paused_at=progress.iteration if progress.pausing else None
            ),
            computed=ComputedShards(operations=self._computation.operations),
            facts=facts or {},
            is_new=is_new,
        )

    def commit(
        self,
        batch: Batch,
        outcome: RoundResult,
        *,
        loss: float | None,
        metrics: Mapping[str, float],
        noise_scale: float | None = None,
        num_turns: int = 1,
    ) -> None:
        """Count the iteration over ``batch`` as done: the computation has applied the ``outcome`` of its round.

        A batch has ``num_turns`` iterations, and its samples count with the last one.
        """
        self.reports.noise_scale = noise_scale
        self._count(batch, outcome, loss=loss, metrics=metrics, num_turns=num_turns)
        self._after_round(outcome)

    def on_call(self, outcome: RoundResult) -> None:
        """Act on the headers of a round in the body of an iteration: what changes does so after `commit_body`."""
        self._state.progress.round = self.rounds.number
        checkpoints = [header.checkpoint for header in outcome.headers]
        self._checkpoints.on_headers(checkpoints)
        self._is_checkpoint_due = self._is_checkpoint_due or self._checkpoints.is_due(checkpoints)
        asks = any(header.asks_for_boundary for header in outcome.headers)
        self._is_boundary_asked_for = self._is_boundary_asked_for or asks

    def commit_body(self, batch: Batch, newest: RoundResult, *, loss: float | None) -> None:
        """Count the iteration over ``batch`` as done, after the rounds of its body; ``newest`` was the last one."""
        is_checkpoint_due, self._is_checkpoint_due = self._is_checkpoint_due, False
        asks_for_boundary, self._is_boundary_asked_for = self._is_boundary_asked_for, False
        self._count(batch, newest, loss=loss, metrics={}, num_turns=1)
        if is_checkpoint_due:
            self._checkpoints.begin(self._state.progress.iteration, self._state)
        if asks_for_boundary:
            self._after_round(self._exchange_headers(trains=True))

    def recovering(self, lost: Abandoned, recover: Callable[[], bool]) -> bool:
        """Continue without the lost member, as ``recover`` does; return whether this member was behind."""
        started = time.perf_counter()
        self._session.changes.begin()
        with self._session.changes.step("recover", suspect=lost.suspect, reason=lost.reason):
            self._computation.begin_membership()
            is_behind = recover()
            self._checkpoints.recovered(is_behind=False)
        self.reports.on_switch(time.perf_counter() - started)
        return is_behind

    def _count(
        self, batch: Batch, outcome: RoundResult, *, loss: float | None, metrics: Mapping[str, float], num_turns: int
    ) -> None:
        progress = self._state.progress
        self._schedule.commit(progress.iteration, batch.batch_size)
        progress.iteration += 1
        progress.turn = (progress.turn + 1) % num_turns
        if progress.turn == 0:
            self._ledger.commit(batch.epoch, outcome.totals.indices)
            progress.epoch, progress.sample = batch.next
        progress.loss, progress.metrics = loss, dict(metrics)
        self._computation.begin_iteration(progress.iteration)
        ends_run = progress.iteration == progress.iterations_total
        ends_epoch = (batch.ends_epoch and progress.turn == 0) or ends_run
        if ends_epoch and self._validator and (ends_run or self._validator.is_due(batch.epoch)):
            self._validator.start()
            ends_epoch = False
        self.reports.on_commit(batch, outcome, ends_epoch=ends_epoch)

    def _start(self, ready: Ready) -> None:
        """Become a member: an initial one with the script's or a checkpoint's state, a joiner with a member's state."""
        if not self._session.join(ready, self._state):
            self._continue_from_state()
            self.reports.on_switch(0.0)
            return
        if self._session.resume:
            with self._session.changes.step("load checkpoint"):
                has_loaded = self._checkpoints.resume(self._state)
            if has_loaded:
                self._continue_from_state()
        first = self._state.progress.round
        while self._state.progress.round == first:
            try:
                self._compare_facts()
            except Abandoned as lost:
                self._recover(lost)

    def _compare_facts(self) -> None:
        """In the first round, find out whether all initial members start with the same data, model and settings."""
        outcome = self._exchange_headers(facts=self._state.facts)
        self.reports.on_switch(0.0)
        self._after_round(outcome)

    def _continue_from_state(self) -> None:
        progress = self._state.progress
        self.rounds.number = progress.round
        self._computation.begin_iteration(progress.iteration)

    def _exchange_headers(self, facts: Facts | None = None, *, trains: bool = False) -> RoundResult:
        iteration = self._state.progress.iteration
        return self.rounds.exchange_headers(lambda: self.header(facts=facts), next_iteration=iteration, trains=trains)

    def _validate(self, validator: Validator) -> None:
        outcome = validator.run_batch(
            self.rounds,
            self._session.view,
            self._session.phases,
            header=self.header(),
            next_iteration=self._state.progress.iteration,
        )
        if not validator.in_progress:
            self._validated(validator)
        self._after_round(outcome)

    def _validated(self, validator: Validator) -> None:
        """Complete a validation. Random numbers are then the same on all workers, whichever shards each has scored."""
        iteration = self._state.progress.iteration
        self._computation.begin_iteration(iteration)
        validator.complete(self._state.progress)
        self.reports.progress(ends_epoch=True)
        self._computation.begin_iteration(iteration)  # callbacks of the lowest rank alone may have drawn some

    def _after_round(self, outcome: RoundResult) -> None:
        """Act on the headers of a committed round: checkpoints, a pause, and changes of membership."""
        progress = self._state.progress
        progress.round = self.rounds.number
        checkpoints = [header.checkpoint for header in outcome.headers]
        self._checkpoints.on_headers(checkpoints)
        pauses = any(header.pause for header in outcome.headers)
        if pauses or self._checkpoints.is_due(checkpoints):
            self._checkpoints.begin(progress.iteration, self._state)
        if pauses:
            self.reports.progress()
            progress.pausing = True  # part of the state, so that a joiner pauses, too
        if outcome.tag.generation != self._session.view.generation:  # it ended without this member, and a recovery
            return
        switch = self._session.agreed(outcome.named)
        if switch:
            self._switch(switch, outcome)

    def _switch(self, switch: Switch, outcome: RoundResult) -> None:
        started = time.perf_counter()
        self._session.changes.begin()
        with self._session.changes.step("switch generation"):
            self._computation.begin_membership()
            self.reports.progress()
            self._session.switch(switch, outcome.tag, self._state)
            self._checkpoints.divide_parts()
        self.reports.on_switch(time.perf_counter() - started)

    def _recover(self, lost: Abandoned) -> None:
        """Continue without the lost member: the members of a newer generation repeat the abandoned round."""
        if isinstance(self.rounds, RepeatedRounds):  # one that leaves has lost those that continue
            self.rounds.recover(lost, self.rounds.number)
            return
        started = time.perf_counter()
        self._session.changes.begin()
        with self._session.changes.step("recover", suspect=lost.suspect, reason=lost.reason):
            self._computation.begin_membership()
            self._computation.discard_round()  # before the state is handed over
            is_behind = self._session.recover(lost, next_round=self._state.progress.round, state=self._state)
            self._continue_from_state()
            self._checkpoints.recovered(is_behind=is_behind)
        self.reports.on_switch(time.perf_counter() - started)

    def _repeat(self) -> None:
        """Repeat a round that nobody has committed, with the same members and another number."""
        self._computation.begin_membership()
        self._computation.discard_round()
        self._state.progress.round = self.rounds.number
        self._continue_from_state()

    def _idle_round(self, facts: Facts | None = None) -> bool:
        """Exchange headers without training; return whether a member is still waiting for a checkpoint."""
        outcome = self._exchange_headers(facts)
        self._after_round(outcome)
        return any(header.checkpoint.is_busy for header in outcome.headers)

    def _pause(self) -> None:
        """Store the checkpoint of a pause, and wait to be stopped, which follows once it is known to be stored."""
        time.sleep(BUSY_SECONDS if self._idle_round() else IDLE_SECONDS)

    def _finish(self) -> None:
        """Wait until unfinished checkpoints and the final model are stored, and report that training is complete.

        Members compare the final model and state, including what changed after the last exchange.
        """
        model, params_sha256 = self._computation.model, self._computation.params_sha256()
        facts = {"final_model": params_sha256, **self._computation.state_facts()}
        self._checkpoints.store_model(model)
        while self._idle_round(facts):
            time.sleep(IDLE_SECONDS if self._checkpoints.is_failing else BUSY_SECONDS)
            self._checkpoints.store_model(model)
        result = self.reports.complete(
            params_sha256,
            model_key=self._checkpoints.model_key,
            bits=self._computation.reproducibility,
            selector=self._validator.selector if self._validator else None,
        )
        # The member that stored the model may be lost before it reports it: then another repeats it.
        self._idle_round(facts)
        self.result = result
        self._session.complete()
