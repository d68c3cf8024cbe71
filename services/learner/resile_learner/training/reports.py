"""What a member reports to its agent: progress, changes of membership, slow members, and the result."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from resile_shared.messages.reports import BatchStep

from ..messages import ChangeTraced, Completed, Joined, Progress, Switched, TracedChange, Warned, WorkerSpan
from ..session import Session
from ..state.run import RunState
from .batch_schedule import BatchSchedule
from .data.batches import Batch
from .data.ledger import Ledger
from .measurements import Measurements
from .rounds import RoundResult
from .selection import Best, Selector
from .stragglers import Stragglers

PROGRESS_SECONDS = 0.1


@dataclass(frozen=True)
class Result:
    """How a training call ended. ``validation`` are the scores of the final model."""

    params_sha256: str
    iterations: int
    samples_seen: int
    loss: float | None
    metrics: Mapping[str, float]
    validation: Mapping[str, float]
    bits: str
    batches: tuple[BatchStep, ...]
    """The sizes of the global batch, each with the iteration that first had it."""
    best: Best | None = None
    """The best validation, if a selection judges them."""


class Reports:
    """Sends a progress message at most every tenth of a second, and measures the time of an iteration.

    Every member compares the paces of all, so that a new lowest rank knows what was already reported.
    """

    def __init__(self, session: Session, state: RunState, ledger: Ledger, schedule: BatchSchedule) -> None:
        self._session = session
        self._state = state
        self._ledger = ledger
        self._schedule = schedule
        self._sent = 0.0
        self._begun = 0.0
        self._committed: float | None = None
        self._iteration_seconds = 0.0
        self._stragglers = Stragglers()
        self._measurements = Measurements()
        self.noise_scale: float | None = None
        self.last = (0, 0.0)
        """`RoundResult.last` of the newest iteration."""
        self._path = ""
        """`RoundResult.path` of the newest iteration."""

    def on_begin(self) -> None:
        """An iteration begins."""
        self._begun = time.perf_counter()
        self._session.changes.on_begin(self._state.progress.iteration)

    def on_commit(self, batch: Batch, outcome: RoundResult, *, ends_epoch: bool) -> None:
        """The iteration over ``batch`` was committed.

        The lowest rank reports progress if it is time to, and members that are slow.
        """
        paces = [header.computed.pace for header in outcome.headers]
        self._path = outcome.path
        if self._session.view.rank == 0:
            now = time.perf_counter()
            self._measurements.add(batch, paces, seconds=now - self._begun)
            if self._committed is not None:
                self._iteration_seconds = now - self._committed
            self._committed = now
            if ends_epoch or now - self._sent >= PROGRESS_SECONDS:
                self._sent = now
                self.progress(ends_epoch=ends_epoch)
        self.last = outcome.last
        self._session.changes.on_commit(self._state.progress.iteration - 1, self._traced)
        warnings = self._stragglers.on_iteration(paces, now=time.monotonic())
        if self._session.view.rank == 0:
            for text in warnings:
                self._session.report(Warned(worker=self._session.view.me, message=text))

    def progress(self, *, ends_epoch: bool = False) -> None:
        """On the lowest rank, report how far the run has come."""
        view, progress = self._session.view, self._state.progress
        if view.rank == 0:
            message = Progress(
                worker=view.me,
                generation=view.generation,
                iteration=progress.iteration,
                epoch=progress.last_epoch,
                loss=progress.loss,
                metrics=progress.metrics,
                validation=progress.validation,
                iteration_seconds=self._iteration_seconds,
                samples_seen=self._ledger.samples_seen,
                ends_epoch=ends_epoch,
                iterations_total=None if self._schedule.has_fixed_length else progress.iterations_total,
                measurement=self._measurements.take(view),
                noise_scale=self.noise_scale,
                exchange_path=self._path,
            )
            self._session.report(message)

    def on_switch(self, pause_seconds: float) -> None:
        """This worker became a member of a generation; training paused for ``pause_seconds``."""
        view, iteration = self._session.view, self._state.progress.iteration
        self._session.phases.take_seconds(())
        self._stragglers.restart(view.workers, now=time.monotonic())
        self._measurements.restart()
        self.last = (0, 0.0)
        if view.rank != 0:
            self._session.report(Joined(worker=view.me, generation=view.generation, iteration=iteration))
            return
        message = Switched(
            worker=view.me,
            generation=view.generation,
            workers=view.workers,
            iteration=iteration,
            pause_seconds=pause_seconds,
        )
        self._session.report(message)

    def _traced(self, spans: tuple[WorkerSpan, ...], is_sample: bool) -> None:
        """Report what this worker did around a change; only the lowest rank reports samples."""
        view = self._session.view
        if not is_sample or view.rank == 0:
            change: TracedChange = "none" if is_sample else "generation"
            self._session.report(ChangeTraced(worker=view.me, generation=view.generation, change=change, spans=spans))

    def complete(
        self, params_sha256: str, *, model_key: str | None, bits: str, selector: Selector | None = None
    ) -> Result:
        """Return the result of the completed run; the lowest rank also reports it."""
        view, progress = self._session.view, self._state.progress
        result = Result(
            params_sha256=params_sha256,
            iterations=progress.iteration,
            samples_seen=self._ledger.samples_seen,
            loss=progress.loss,
            metrics=progress.metrics,
            validation=selector.final_scores(progress.validation) if selector else progress.validation,
            bits=bits,
            batches=self._schedule.steps,
            best=selector.best if selector else None,
        )
        if view.rank == 0:
            completed = Completed(
                worker=view.me,
                generation=view.generation,
                iteration=result.iterations,
                epoch=progress.epoch,
                samples_seen=result.samples_seen,
                loss=result.loss,
                metrics=progress.metrics,
                validation=dict(result.validation),
                params_sha256=result.params_sha256,
                model=model_key,
                ledger=self._ledger.epochs(),
                bits=bits,
                batches=result.batches if self._schedule.batch_range else (),
            )
            self._session.report(completed)
        return result
