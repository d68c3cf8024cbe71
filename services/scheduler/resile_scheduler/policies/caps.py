"""Tenants that may hold no more than some number of slots, whatever is free.

1. The policy shares all slots as if no tenant had a cap. If no tenant exceeds its cap, it is the answer.
2. The policy shares the cap of a tenant that exceeds it among the jobs of this tenant alone. What each gets is the most
   that it can use from then on, and the policy shares all slots again.

A job that keeps its slots, as a gang that has started does, keeps them also if its tenant's cap is lowered below that:
the other jobs of the tenant share what is left of the cap.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .demand import Demand, Policy, Target


def within_caps(policy: Policy, caps: Mapping[str, int]) -> Policy:
    """Return ``policy`` with at most ``caps`` slots for the jobs of each tenant; others have no cap."""
    if not caps:
        return policy

    def decide(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        limited: dict[str, Demand] = {}
        waiting: dict[str, Target] = {}
        while True:
            asking = [limited.get(d.job, d) for d in demands if d.job not in waiting]
            targets = policy(asking, num_slots) if asking else {}
            tenants = {d.tenant for d in limited.values()} | {d.tenant for d in demands if d.job in waiting}
            exceeding = _exceeding(asking, targets, caps) - tenants
            if not exceeding:
                break
            for tenant in exceeding:
                own = [demand for demand in demands if demand.tenant == tenant]
                for demand, most in _shared(policy, own, caps[tenant], num_slots):
                    if most:
                        limited[demand.job] = replace(demand, most=min(demand.most, most))
                    else:
                        waiting[demand.job] = Target(0, _reason(demand, caps))
        given = targets | waiting
        return {d.job: _explained(d, limited.get(d.job, d), given[d.job], caps) for d in demands}

    return decide


def _exceeding(demands: Sequence[Demand], targets: Mapping[str, Target], caps: Mapping[str, int]) -> set[str]:
    """Return the tenants whose jobs get more than their caps together."""
    given = Counter[str]()
    for demand in demands:
        given[demand.tenant] += targets[demand.job].workers
    return {tenant for tenant, num in given.items() if num > caps.get(tenant, num)}


def _shared(policy: Policy, own: Sequence[Demand], cap: int, num_slots: int) -> list[tuple[Demand, int]]:
    """Return the most that each job of a tenant can have within its cap."""
    kept = [demand for demand in own if not demand.is_preemptible]
    others = [demand for demand in own if demand.is_preemptible]
    left = max(0, min(cap, num_slots) - sum(demand.least for demand in kept))
    targets = policy(others, left) if others else {}
    return [*((demand, demand.most) for demand in kept), *((demand, targets[demand.job].workers) for demand in others)]


def _explained(demand: Demand, limited: Demand, target: Target, caps: Mapping[str, int]) -> Target:
    """Say that the cap is the reason if the job has all that it leaves, and could use more."""
    if target.workers and target.workers == limited.most < demand.most:
        return replace(target, reason=_holds(demand, caps))
    return target


def _reason(demand: Demand, caps: Mapping[str, int]) -> str:
    wanted = f"{demand.least} slots" if demand.least > 1 else "a slot"
    return f"waiting for {wanted}: {_holds(demand, caps)}"


def _holds(demand: Demand, caps: Mapping[str, int]) -> str:
    return f"tenant {demand.tenant} may hold {caps[demand.tenant]} slots at most"
