"""Slots are divided among tenants, and the policy of the pool divides each tenant's slots among its jobs.

1. Jobs that keep what they have, as gangs do and all jobs while preemption is off, have it from their tenant's slots.
   If the pool has lost so many slots that they do not all fit, those count that fit together.
2. Each tenant gets its quota, as far as its jobs can use it. Quotas that do not fit are reduced in proportion.
3. Each tenant gets the minimum of the job that the policy would serve first, if it fits beside what the others have
   by then, or of the next one that fits. The jobs of all tenants come in their turns (`ranking.turn`), and those of the
   same turn by what their tenants have attained for their weights.
4. All slots are divided in proportion to weights: ``clamp(level * weight, least, most)``, where the least is what a
   tenant has by these steps, and the most is what its jobs can use.
5. What the policy cannot use of a tenant's slots is lent to the others.

With the jobs of one tenant alone, the targets are those of the policy.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from resile_shared.messages.pool import TenantShare

from .demand import Demand, Key, Policy, Ranking, Target
from .ranking import turn
from .shares import ALL_IT_CAN_USE, admit, divide, reason_to_wait, within_sizes


def by_tenant(
    policy: Policy, shares: Mapping[str, TenantShare], *, ranking: Ranking, attained: Mapping[str, float]
) -> Policy:
    """Return the policy that divides slots among tenants by ``shares``, and those of each among its jobs by ``policy``.

    ``ranking`` is the order in which ``policy`` serves minimums. Tenants that ``shares`` lacks have the default.
    ``attained`` has the slot-seconds that the jobs of each tenant have held recently.
    """

    def decide(demands: Sequence[Demand], num_slots: int) -> dict[str, Target]:
        if len({demand.tenant for demand in demands}) < 2:
            return policy(demands, num_slots)
        key = ranking(demands)
        tenants = _group([within_sizes(demand) for demand in demands], shares, num_slots, key=key)
        _claim_quotas(tenants, num_slots)
        _claim_minimums(tenants, num_slots, attained)
        _divide(tenants, num_slots, policy)
        _lend(tenants, num_slots, policy)
        given: dict[str, Target] = {}
        for tenant in tenants:
            given.update(_explained(tenant, num_slots))
        return {demand.job: given[demand.job] for demand in demands}

    return decide


@dataclass
class _Tenant:
    """A tenant, its jobs in the order in which their minimums are served, and what it has by the steps so far."""

    name: str
    share: TenantShare
    jobs: list[Demand]
    most: int
    """How many slots the tenant's jobs can use."""
    claim: int
    """The fewest slots that the tenant gets."""
    quota: int
    """How many slots of its quota the tenant's jobs can use."""
    is_reduced: bool = False
    """Whether the tenant's quota does not fit beside those of others."""
    slots: int = -1
    used: int = 0
    """How many of ``slots`` the tenant's jobs get."""
    targets: dict[str, Target] = field(default_factory=dict)

    def give(self, slots: int, targets: dict[str, Target]) -> None:
        """Record how its jobs share ``slots``."""
        self.slots, self.targets, self.used = slots, targets, _num_workers(targets)


def _group(demands: Sequence[Demand], shares: Mapping[str, TenantShare], num_slots: int, *, key: Key) -> list[_Tenant]:
    """Return the tenants of the jobs, by name."""
    jobs: dict[str, list[Demand]] = {}
    for demand in sorted(demands, key=lambda d: (d.is_preemptible, *key(d))):
        jobs.setdefault(demand.tenant, []).append(demand)
    kept = Counter[str]()
    for demand in admit([demand for demand in demands if not demand.is_preemptible], num_slots, key=key):
        kept[demand.tenant] += demand.least
    tenants = []
    for name in sorted(jobs):
        share = shares.get(name, TenantShare())
        able = [job for job in jobs[name] if _is_able(job, num_slots)]
        most = min(num_slots, sum(job.most for job in able))
        tenants.append(_Tenant(name, share, jobs[name], most, kept[name], min(share.quota, most)))
    return tenants


def _claim_quotas(tenants: Sequence[_Tenant], num_slots: int) -> None:
    wanting = [tenant for tenant in tenants if tenant.quota > tenant.claim]
    left = num_slots - sum(tenant.claim for tenant in tenants if tenant not in wanting)
    claims = divide([(tenant.share.quota, tenant.claim, tenant.quota) for tenant in wanting], left)
    for tenant, claim in zip(wanting, claims, strict=True):
        tenant.is_reduced = claim < tenant.quota
        tenant.claim = tenant.quota = claim


def _claim_minimums(tenants: Sequence[_Tenant], num_slots: int, attained: Mapping[str, float]) -> None:
    """Raise claims to the minimums that fit, in the turns of the jobs that would get them.

    The turns are those of jobs, and not of tenants: a job that starts keeps its turn, whatever its tenant waits for.
    """
    left = num_slots - sum(tenant.claim for tenant in tenants)
    first = [(tenant, job) for tenant in tenants for job in _served_first(tenant, num_slots)]
    turn_of = turn([job for _, job in first])

    def key(item: tuple[_Tenant, Demand]) -> tuple[float | str, ...]:
        tenant, job = item
        return turn_of(job), attained.get(tenant.name, 0.0) / tenant.share.weight, tenant.name

    for tenant, job in sorted(first, key=key):
        missing = max(job.least - tenant.claim, 0)
        if missing <= left:
            tenant.claim += missing
            left -= missing


def _served_first(tenant: _Tenant, num_slots: int) -> Iterator[Demand]:
    """Return the jobs that would get a claim to their minimum: what the policy serves before them needs more slots.

    A job that was due when it got its slots had a claim to them then, and keeps it: otherwise the next decision would
    take them away before it has trained.
    """
    needed = num_slots + 1
    for job in sorted(tenant.jobs, key=lambda job: not job.was_due):
        if _is_able(job, num_slots) and job.least < needed:
            needed = job.least
            yield job


def _divide(tenants: Sequence[_Tenant], num_slots: int, policy: Policy) -> None:
    """Divide the slots by weight, and give to the others what jobs of a tenant cannot use."""
    while True:
        limits = [(tenant.share.weight, tenant.claim, tenant.most) for tenant in tenants]
        for tenant, slots in zip(tenants, divide(limits, num_slots), strict=True):
            if slots != tenant.slots:
                tenant.give(slots, policy(tenant.jobs, slots))
        sated = [tenant for tenant in tenants if tenant.used < tenant.slots]
        if not sated:
            return
        for tenant in sated:
            tenant.most = tenant.slots = tenant.used
            tenant.claim = min(tenant.claim, tenant.most)


def _lend(tenants: Sequence[_Tenant], num_slots: int, policy: Policy) -> None:
    """Offer what is still left, all at once, to one tenant after the other: it may suffice for a minimum."""
    left = num_slots - sum(tenant.used for tenant in tenants)
    for tenant in sorted(tenants, key=lambda t: (t.used / t.share.weight, t.name)):
        targets = policy(tenant.jobs, tenant.used + left) if left else tenant.targets
        more = _num_workers(targets) - tenant.used
        if more > 0:
            tenant.give(tenant.used + left, targets)
            left -= more


def _explained(tenant: _Tenant, num_slots: int) -> dict[str, Target]:
    """Return the targets of its jobs, with reasons that say what the tenant has where that is what limits them."""
    has = f"tenant {tenant.name} has {tenant.used} of {num_slots} slots"
    if tenant.is_reduced:
        has += f", and its quota of {tenant.share.quota} is reduced to {tenant.quota}: the quotas exceed the slots"

    def reason(job: Demand, target: Target) -> str:
        if target.workers == job.most or target.error:
            return target.reason
        if not _is_able(job, num_slots):
            return reason_to_wait(job, num_slots, "")
        if not target.workers and job.least > tenant.slots:
            return reason_to_wait(job, num_slots, has)
        return has if target.reason == ALL_IT_CAN_USE else f"{target.reason}; {has}"

    explained = {}
    for job in tenant.jobs:
        target = tenant.targets[job.job]
        text = reason(job, target)
        explained[job.job] = target if text is target.reason else replace(target, reason=text)
    return explained


def _is_able(job: Demand, num_slots: int) -> bool:
    return 0 < job.least <= min(job.most, num_slots)


def _num_workers(targets: Mapping[str, Target]) -> int:
    return sum(target.workers for target in targets.values())
