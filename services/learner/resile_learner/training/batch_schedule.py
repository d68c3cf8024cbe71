"""The global batch of each iteration of a run, where it may change.

An order contains the batch of its generation, so all members of a round agree on it. Only the batches of committed
iterations are kept: members whose round was abandoned may have received different orders.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from resile_shared.errors import UsageError
from resile_shared.messages.reports import MAX_BATCH_STEPS, BatchRange, BatchStep

from .data.batches import BatchPlan, Position


def declared_range(batch_range: tuple[int, int], *, num_shards: int) -> BatchRange:
    """Return the range to report to the scheduler; if ``num_shards`` exceeds the least, a slot needs two samples."""
    least, most = batch_range
    return BatchRange(least=least, most=most, least_per_slot=1 if num_shards <= least else min(2, least))


class BatchSchedule:
    """The batches of a run, each with the iteration that first had it: ``steps``, at most `MAX_BATCH_STEPS`.

    ``batch_range`` is what the training call declares; without it the batch is always ``batch_size``. ``replayed`` is
    the schedule of another run, which then decides alone. Raises UsageError if this run cannot have those batches.
    """

    def __init__(
        self,
        batch_size: int,
        batch_range: BatchRange | None = None,
        *,
        replayed: Sequence[BatchStep] = (),
        has_fixed_length: bool = True,
    ) -> None:
        self.has_fixed_length = has_fixed_length and batch_range is None
        """Whether the number of iterations was known at the start."""
        self.batch_range = batch_range
        self.steps: tuple[BatchStep, ...] = (BatchStep(iteration=0, batch_size=batch_size),)
        self._replayed = tuple(replayed)
        for step in replayed:
            _check(step.batch_size, batch_size, batch_range)

    @property
    def current(self) -> int:
        """The batch of the last committed iteration; before the first, that of the training call."""
        return self.steps[-1].batch_size

    def next(self, iteration: int, *, ordered: int | None) -> int:
        """Return the batch of ``iteration``, the next one, in a generation whose order says ``ordered``."""
        if self._replayed:
            return self._replayed[bisect(self._replayed, iteration, key=_iteration) - 1].batch_size
        if ordered is None or self.batch_range is None or len(self.steps) == MAX_BATCH_STEPS:
            return self.current
        return min(max(ordered, self.batch_range.least), self.batch_range.most)

    def commit(self, iteration: int, batch_size: int) -> None:
        """Record that ``iteration`` was committed with this batch."""
        if batch_size != self.current:
            before = self.steps if iteration else ()
            self.steps = (*before, BatchStep(iteration=iteration, batch_size=batch_size))

    def iterations_total(self, iteration: int, plan: BatchPlan, position: Position, *, epochs: int) -> int:
        """Return how many iterations the run has if ``iteration`` begins at ``position`` with the batch of ``plan``.

        Exact where the batches to come are known: those of a replayed schedule, and the one that never changes.
        """
        for step in self._replayed[bisect(self._replayed, iteration, key=_iteration) :]:
            num_before = step.iteration - iteration
            if plan.num_batches(position, epochs=epochs) <= num_before:
                break
            position = plan.position(num_before, start=position)
            iteration, plan = step.iteration, replace(plan, batch_size=step.batch_size)
        return iteration + plan.num_batches(position, epochs=epochs)

    def state_dict(self) -> dict[str, Any]:
        """The steps as plain values."""
        return {"steps": [[step.iteration, step.batch_size] for step in self.steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self.steps = tuple(BatchStep(iteration=first, batch_size=size) for first, size in state["steps"])


def _iteration(step: BatchStep) -> int:
    return step.iteration


def _check(batch_size: int, own: int, batch_range: BatchRange | None) -> None:
    if batch_range is None and batch_size != own:
        raise UsageError(
            f"--batches has a batch of {batch_size}, and the training call has one of {own} and no batch_range: "
            "declare that of the run that is replayed"
        )
    if batch_range and not batch_range.least <= batch_size <= batch_range.most:
        raise UsageError(
            f"--batches has a batch of {batch_size}, and the training call's batch_range is {batch_range}: declare "
            "that of the run that is replayed"
        )
