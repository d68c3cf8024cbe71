"""Preemption off: what a job has is not taken from it for another one.

- A job that has slots keeps its number of workers when others arrive, resume, or change their priority, and when its
  own priority changes. It may grow, by slots that are free, as its policy says.
- When slots disappear, the policy decides how the jobs that had slots share what is left of them: none gains by it.
- What they leave is shared as the policy says, with what they keep as their minimums.
- What starts meanwhile does not make room for a job that has waited for long. So while the first such job waits, none
  starts that ranks after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .demand import Demand, Policy, Ranking, Target
from .ranking import in_turn, is_due
from .shares import within_sizes


def without_preemption(policy: Policy, *, ranking: Ranking = in_turn) -> Policy:
    """Return ``policy`` with preemption off; ``ranking`` is the order in which it serves minimums."""

    def decide(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        kept = _kept(policy, demands, num_slots)
        demands = [_keeping(d, kept[d.job]) if kept.get(d.job) else d for d in demands]
        targets = policy(demands, num_slots)
        first = _first_due(demands, targets, num_slots, ranking)
        if first is None:
            return targets
        key = ranking(demands)
        held_back = {d.job for d in demands if d.is_preemptible and key(d) > key(first)}
        reason = f"waiting: slots are kept for {first.job}, which has waited for long"
        return {
            **dict.fromkeys((demand.job for demand in demands), Target(0, reason)),
            **policy([demand for demand in demands if demand.job not in held_back], num_slots),
        }

    return decide


def _first_due(
    demands: Sequence[Demand], targets: Mapping[str, Target], num_slots: int, ranking: Ranking
) -> Demand | None:
    """Return the first of the jobs that are due and that wait although the slots would suffice for their minimum."""
    due = [demand for demand in demands if is_due(demand) and not targets[demand.job].workers]
    able = [demand for demand in map(within_sizes, due) if 0 < demand.least <= min(demand.most, num_slots)]
    return min(able, key=ranking(demands), default=None)


def _kept(policy: Policy, demands: Sequence[Demand], num_slots: int) -> dict[str, int]:
    """Return how many workers each job that has some keeps: all of them, as long as the slots suffice."""
    holding = [within_sizes(demand) for demand in demands if demand.assigned_workers]
    had = [within_sizes(replace(d, most=min(d.most, max(d.assigned_workers, d.least)))) for d in holding]
    had = [demand for demand in had if demand.least <= demand.most]
    if sum(demand.most for demand in had) <= num_slots:
        return {demand.job: demand.most for demand in had}
    return {job: target.workers for job, target in policy(had, num_slots).items()}


def _keeping(demand: Demand, workers: int) -> Demand:
    return replace(demand, least=workers, is_preemptible=False, keeps_all=True)
