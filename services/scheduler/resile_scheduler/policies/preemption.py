"""Preemption off: what a job has is not taken from it for another one.

- A job that has slots keeps its number of workers when others arrive, resume, or change their priority, and when its
  own priority changes. It may grow, by slots that are free, as its policy says.
- When slots disappear, the policy decides how the jobs that had slots share what is left of them: none gains by it.
- What they leave is shared as the policy says, with what they keep as their minimums.
- A job that starts meanwhile would not make room for one that has waited for long. So while the first such job waits,
  no job that ranks after it starts on slots that it can use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from .demand import Demand, Policy, Ranking, Target
from .ranking import in_turn, is_due
from .rooms import Rooms, is_confining
from .shares import within_sizes


def without_preemption(policy: Policy, *, ranking: Ranking = in_turn) -> Policy:
    """Return ``policy`` with preemption off; ``ranking`` is the order in which it serves minimums."""

    def decide(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        kept = _kept(policy, demands, num_slots)
        asking = [_keeping(d, kept[d.job]) if kept.get(d.job) else d for d in demands]
        decided: dict[str, Target] = {}
        while True:
            targets = policy(asking, num_slots)
            first = _first_due(asking, targets, num_slots, ranking)
            if first is None:
                break
            key = ranking(asking)
            held_back = {d.job: d for d in asking if d.is_preemptible and key(d) > key(first)}
            others = [demand for demand in asking if demand.job not in held_back]
            reason = f"waiting: slots are kept for {first.job}, which has waited for long"
            targets = dict.fromkeys(held_back, Target(0, reason)) | policy(others, num_slots)
            fixed, able = _beside(first, others, list(held_back.values()), targets, num_slots)
            if not able:
                break
            asking = [*fixed, *able]
            decided = targets | decided
            for demand in able:
                del decided[demand.job]
        return {demand.job: (decided if demand.job in decided else targets)[demand.job] for demand in demands}

    return decide


def _beside(
    first: Demand, others: Sequence[Demand], held_back: Sequence[Demand], targets: Mapping[str, Target], num_slots: int
) -> tuple[list[Demand], list[Demand]]:
    """Return what is taken for good, also for ``first``, and those of ``held_back`` that can use what is left then.

    If every job may use every slot, nothing is left: the first one would have it.
    """
    if not is_confining((*others, *held_back)):
        return [], []
    rooms = Rooms((*others, *held_back), num_slots)
    given = rooms.loads(others, targets)
    workers = {demand.job: targets[demand.job].workers for demand in others}
    if not workers[first.job]:
        workers[first.job] = min(first.least, rooms.left([first], given))
        given[rooms.kind(first)] += workers[first.job]
    fixed = [_exactly(demand, workers[demand.job]) for demand in others if workers[demand.job]]
    left = {rooms.kind(demand): rooms.left([demand], given) for demand in held_back}
    return fixed, [demand for demand in held_back if left[rooms.kind(demand)]]


def _exactly(demand: Demand, workers: int) -> Demand:
    return replace(_keeping(demand, workers), most=workers, sizes=None, due_since=inf)


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
    is_enough = sum(demand.most for demand in had) <= num_slots
    if is_enough and not (is_confining(had) and Rooms(had, num_slots).are_scarce(had)):
        return {demand.job: demand.most for demand in had}
    return {job: target.workers for job, target in policy(had, num_slots).items()}


def _keeping(demand: Demand, workers: int) -> Demand:
    return replace(demand, least=workers, is_preemptible=False, keeps_all=True)
