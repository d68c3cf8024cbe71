"""A plan as text: numbers of workers over iterations, as in ``0:1,50:4,120:3,200:8``."""

from collections.abc import Iterator
from itertools import pairwise

from resile_scheduler.policies.plan import PlanStep
from resile_shared.errors import UsageError

MAX_WORKERS = 1024


class PlanError(UsageError):
    """A plan that cannot be parsed."""

    def __init__(self, text: str, fault: str) -> None:
        self.text = text
        super().__init__(
            f"--plan {text!r}: {fault}. A plan is ITERATION:WORKERS pairs separated by commas, starting at iteration "
            "0, such as 0:1,50:4,120:3"
        )


def parse_plan(text: str) -> tuple[PlanStep, ...]:
    """Parse a plan. Raises PlanError."""
    if not text.strip():
        raise PlanError(text, "it is empty")
    steps = tuple(_parse_steps(text))
    if steps[0].iteration != 0:
        raise PlanError(text, f"it starts at iteration {steps[0].iteration}, not at 0")
    for before, after in pairwise(steps):
        if after.iteration <= before.iteration:
            raise PlanError(text, f"iteration {after.iteration} does not come after {before.iteration}")
    return steps


def _parse_steps(text: str) -> Iterator[PlanStep]:
    for part in text.split(","):
        numbers = [number.strip() for number in part.split(":")]
        if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise PlanError(text, f"{part.strip()!r} is not a pair of whole numbers like 50:4")
        iteration, workers = int(numbers[0]), int(numbers[1])
        if workers < 1:
            raise PlanError(text, f"{part.strip()!r} leaves no worker; at least 1 is needed")
        if workers > MAX_WORKERS:
            raise PlanError(text, f"{part.strip()!r} asks for more than {MAX_WORKERS} workers on one machine")
        yield PlanStep(iteration, workers)
