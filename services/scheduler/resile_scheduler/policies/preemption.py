"""Preemption off: what a job has is not taken from it for another one.

- A job that has slots keeps its number of workers when others arrive, resume, or change their priority, and when its
  own priority changes. It may grow, by slots that are free, as its policy says.
- When slots disappear, the policy decides how the jobs that had slots share what is left of them: none gains by it.
- What they leave is shared as the policy says, with what they keep as their minimums.
"""

from collections.abc import Sequence
from dataclasses import replace

from .demand import Demand, Policy, Target
from .shares import within_sizes


def without_preemption(policy: Policy) -> Policy:
    """Return ``policy`` with preemption off."""

    def decide(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        kept = _kept(policy, demands, num_slots)
        return policy([_keeping(d, kept[d.job]) if kept.get(d.job) else d for d in demands], num_slots)

    return decide


def _kept(policy: Policy, demands: Sequence[Demand], num_slots: int) -> dict[str, int]:
    """Return how many workers each job that has some keeps: all of them, as long as the slots suffice."""
    holding = [within_sizes(demand) for demand in demands if demand.assigned_workers]
    had = [within_sizes(replace(d, most=min(d.most, max(d.assigned_workers, d.least)))) for d in holding]
    had = [demand for demand in had if demand.least <= demand.most]
    if sum(demand.most for demand in had) <= num_slots:
        return {demand.job: demand.most for demand in had}
    return {job: target.workers for job, target in policy(had, num_slots).items()}


def _keeping(demand: Demand, workers: int) -> Demand:
    return replace(demand, least=workers, is_preemptible=False)
