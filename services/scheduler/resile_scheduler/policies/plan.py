"""A policy that follows a plan: from which iteration on a job has how many workers, exactly.

- The step in effect is the newest that begins no later than the generation that trains. If that generation has
  another number of workers (members were lost, or nothing trains yet), the job gets as many as the step says, at once.
- If the members of that generation would wait before the next step's iteration (for a step that the plan had before the
  number of shards was known), they get a generation that ends at that iteration.
- Otherwise the next step is prepared: its generation may not train before the step's iteration, and members wait at
  that iteration until it is formed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from .demand import Demand, Target


@dataclass(frozen=True)
class PlanStep:
    """From ``iteration`` on, ``workers`` train."""

    iteration: int
    workers: int

    def __str__(self) -> str:
        return f"{self.iteration}:{self.workers}"


@dataclass(frozen=True)
class PlanPolicy:
    """Gives each job what ``steps`` say: one or more, the first at iteration 0, iterations rising.

    ``fits_shards``: numbers are cut to the job's number of shards; without it, a job that cannot have what the plan
    says fails. ``reason`` goes into the history; without one, the step does.
    """

    steps: tuple[PlanStep, ...]
    fits_shards: bool = False
    reason: str = ""

    def __call__(self, demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        """Return the target of each job."""
        return {demand.job: self._target(demand) for demand in demands}

    def error(self, *, num_shards: int, batch_size: int, iterations_total: int | None = None) -> str:
        """Return why a job with these numbers can never follow this plan; empty if it can."""
        most = max(step.workers for step in self._effective_steps(iterations_total))
        if self.fits_shards or most <= num_shards:
            return ""
        return (
            f"{most} workers are too many: a batch of {batch_size} samples is cut into {num_shards} "
            f"shard{'s' * (num_shards != 1)}, one for each worker: use at most {num_shards} "
            f"worker{'s' * (num_shards != 1)}, or set num_shards={most} or more in the training call"
        )

    def _target(self, demand: Demand) -> Target:
        total = demand.iterations_total if demand.has_fixed_length else None
        if demand.num_shards is not None:
            error = self.error(num_shards=demand.num_shards, batch_size=demand.batch_size, iterations_total=total)
            if error:
                return Target(0, error, error=error)
        steps = self._fitted(self._effective_steps(total), demand)
        begun = demand.active_since if demand.active_workers else demand.iteration
        current = max(number for number, step in enumerate(steps) if step.iteration <= begun or number == 0)
        if current + 1 < len(steps) and _reaches(demand, steps[current].workers, steps[current + 1].iteration):
            current += 1
        workers = steps[current].workers
        is_ahead = demand.active_workers > 0 and steps[current].iteration > begun
        # Members may go on waiting for a step beyond the end: they never reach it.
        later = [s.iteration for s in self._fitted(self.steps, demand) if s.iteration > steps[current].iteration]
        until = next((iteration for iteration in later if iteration != total), None)
        return Target(
            workers,
            self.reason
            or self._reason(steps[current], is_replacement=not is_ahead and 0 < demand.active_workers < workers),
            is_exact=True,
            not_before=steps[current].iteration if is_ahead else 0,
            until=until,
        )

    def _reason(self, step: PlanStep, *, is_replacement: bool) -> str:
        if is_replacement:
            return "new workers replace those that were lost"
        return f"plan {step}" if len(self.steps) > 1 else "as many as it was given"

    def _fitted(self, steps: Sequence[PlanStep], demand: Demand) -> list[PlanStep]:
        """Cut the numbers of ``steps`` to the job's shards, if they may be; steps that change nothing are left out."""
        most = demand.num_shards if self.fits_shards else None
        cut = [PlanStep(step.iteration, min(step.workers, most or step.workers)) for step in steps]
        return cut[:1] + [after for before, after in pairwise(cut) if after.workers != before.workers]

    def _effective_steps(self, total: int | None) -> list[PlanStep]:
        """Leave out the steps at which training, of ``total`` iterations if that is known, has ended already."""
        return [step for step in self.steps if total is None or step.iteration < max(total, 1)]


def _reaches(demand: Demand, workers: int, iteration: int) -> bool:
    """Whether the generation that trains has ``workers`` workers, and may train until ``iteration``."""
    until = inf if demand.active_until is None else demand.active_until
    return demand.active_workers == workers and until >= iteration
