"""Plans as text: numbers of workers, or batches, over iterations, as in ``0:1,50:4,120:3,200:8``."""

from collections.abc import Iterator
from itertools import pairwise

from resile_scheduler.policies.plan import PlanStep
from resile_shared.errors import UsageError
from resile_shared.messages.message import MAX_INTEGER
from resile_shared.messages.reports import MAX_BATCH_STEPS, BatchStep

MAX_LOCAL_WORKERS = 1024


class PlanError(UsageError):
    """A plan that cannot be parsed."""

    def __init__(self, text: str, fault: str) -> None:
        self.text = text
        super().__init__(
            f"--plan {text!r}: {fault}. A plan is ITERATION:WORKERS pairs separated by commas, starting at iteration "
            "0, such as 0:1,50:4,120:3"
        )


class BatchesError(UsageError):
    """A batch schedule that cannot be parsed."""

    def __init__(self, text: str, fault: str) -> None:
        self.text = text
        super().__init__(
            f"--batches {text!r}: {fault}. Batches are ITERATION:SAMPLES pairs separated by commas, starting at "
            "iteration 0, such as 0:64,120:256"
        )


Fault = type[PlanError] | type[BatchesError]


def parse_plan(text: str) -> tuple[PlanStep, ...]:
    """Parse a plan. Raises PlanError."""
    pairs = _parse(text, PlanError)
    for iteration, workers in pairs:
        if workers < 1:
            raise PlanError(text, f"'{iteration}:{workers}' leaves no worker; at least 1 is needed")
        if workers > MAX_LOCAL_WORKERS:
            raise PlanError(
                text, f"'{iteration}:{workers}' asks for more than {MAX_LOCAL_WORKERS} workers on one machine"
            )
    return tuple(PlanStep(iteration, workers) for iteration, workers in pairs)


def parse_batches(text: str) -> tuple[BatchStep, ...]:
    """Parse the batches of a run, as its result has them. Raises BatchesError."""
    pairs = _parse(text, BatchesError)
    if len(pairs) > MAX_BATCH_STEPS:
        raise BatchesError(text, f"it has {len(pairs)} pairs, and a run has at most {MAX_BATCH_STEPS}")
    for iteration, size in pairs:
        if size < 1:
            raise BatchesError(text, f"'{iteration}:{size}' is not a batch; a batch has at least 1 sample")
    return tuple(BatchStep(iteration=iteration, batch_size=size) for iteration, size in pairs)


def _parse(text: str, fault: Fault) -> list[tuple[int, int]]:
    if not text.strip():
        raise fault(text, "it is empty")
    pairs = list(_pairs(text, fault))
    if pairs[0][0] != 0:
        raise fault(text, f"it starts at iteration {pairs[0][0]}, not at 0")
    for (before, _), (after, _) in pairwise(pairs):
        if after <= before:
            raise fault(text, f"iteration {after} does not come after {before}")
    return pairs


def _pairs(text: str, fault: Fault) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        numbers = [number.strip() for number in part.split(":")]
        if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise fault(text, f"{part.strip()!r} is not a pair of whole numbers like 50:4")
        if any(len(number) > len(str(MAX_INTEGER)) - 1 for number in numbers):
            raise fault(text, f"{part.strip()!r} is too large")
        yield int(numbers[0]), int(numbers[1])
