"""What operators have chosen: the policy, and what tenants get of the slots. Every later scheduler keeps both."""

from collections.abc import Mapping

from resile_shared.messages.commands import Accepted, PoolPolicy, Refused, TenantDelete, TenantSet
from resile_shared.messages.jobs import MAX_COMMANDS
from resile_shared.messages.message import at
from resile_shared.messages.pool import MAX_TENANTS, PolicyRecord, TenantShare, TenantsRecord
from resile_shared.policies import PolicyName

from ..policies.caps import within_caps
from ..policies.demand import RankedPolicy
from ..policies.preemption import without_preemption
from ..policies.rooms import within_rooms
from ..policies.tenants import by_tenant
from .events import PolicyChangeRequested, StorePolicy, StoreTenants, TenantChangeRequested
from .slots.decisions import Decisions
from .state.pool import Pool


class PolicyChoice:
    """The chosen one of ``policies``; ``initial``, with which this scheduler was started, precedes the stored one."""

    def __init__(
        self,
        decisions: Decisions,
        policies: Mapping[PolicyName, RankedPolicy],
        *,
        initial: PoolPolicy,
        attained: Mapping[str, float],
    ) -> None:
        self._decisions = decisions
        self._policies = policies
        self._initial = initial
        self._attained = attained
        self._record = self._stored = PolicyRecord()
        self._shares: Mapping[str, TenantShare] = {}

    def restore(self, stored: PolicyRecord | None, *, now: float) -> None:
        """Take over what is stored, and apply what this scheduler was started with."""
        if stored is not None and stored.policy in self._policies:
            self._record = self._stored = stored
        if self._policies:
            self._use("")
        self._change(self._initial, now=now)

    def change(self, event: PolicyChangeRequested, *, now: float) -> Accepted | Refused:
        """Change the policy, unless this request did so before."""
        policy = event.request.policy
        if policy is not None and policy not in self._policies:
            known = ", ".join(sorted(self._policies))
            return Refused(code="invalid", reason=f"unknown policy {policy}: this pool knows {known}")
        if event.command not in self._record.applied_commands:
            self._change(event.request, now=now)
            newest = (*self._record.applied_commands, event.command)[-MAX_COMMANDS:]
            self._record = self._record.model_copy(update={"applied_commands": newest})
        return Accepted()

    def use_shares(self, shares: Mapping[str, TenantShare], cause: str) -> None:
        """Divide slots among tenants by ``shares`` from now on; ``cause`` is the reason in the histories."""
        self._shares = shares
        if self._policies:
            self._use(cause)

    def take_changes(self) -> list[StorePolicy]:
        """Return the changes that are not stored yet; each is returned once."""
        if self._record is self._stored:
            return []
        self._stored = self._record
        return [StorePolicy(self._record)]

    def _change(self, request: PoolPolicy, *, now: float) -> None:
        before = self._record
        policy = before.policy if request.policy is None else request.policy
        preemption = before.preemption if request.preemption is None else request.preemption
        causes = [f"policy {policy}"] if policy is not before.policy else []
        if preemption is not before.preemption:
            causes.append(f"preemption {'on' if preemption else 'off'}")
        if causes:
            changes = {"policy": policy, "preemption": preemption, "number": before.number + 1, "changed": at(now)}
            self._record = before.model_copy(update=changes)
            self._use(", ".join(causes))

    def _use(self, cause: str) -> None:
        policy = self._policies[self._record.policy]
        among_tenants = by_tenant(policy, self._shares, ranking=policy.ranking, attained=self._attained)
        chosen = within_rooms(among_tenants)
        if not self._record.preemption:
            chosen = without_preemption(chosen, ranking=policy.ranking)
        caps = {tenant: share.cap for tenant, share in self._shares.items() if share.cap}
        self._decisions.change_policy(within_caps(chosen, caps), cause, caps=caps)


class TenantShares:
    """The weights, quotas and caps of tenants. Quotas that exceed the slots of the pool are refused."""

    def __init__(self, pool: Pool, policy_choice: PolicyChoice) -> None:
        self._pool = pool
        self._policy_choice = policy_choice
        self._record = self._stored = TenantsRecord()

    def restore(self, stored: TenantsRecord | None) -> None:
        """Take over what is stored."""
        if stored is not None:
            self._record = self._stored = stored
            self._policy_choice.use_shares(stored.tenants, "")

    def change(self, event: TenantChangeRequested, *, now: float) -> Accepted | Refused:
        """Change a tenant, unless this request did so before."""
        if event.command in self._record.applied_commands:
            return Accepted()
        before = self._record.tenants.get(event.request.tenant_id)
        share: TenantShare | None = None
        match event.request:
            case TenantSet() as request:
                share = _changed(before or TenantShare(), request)
                if reason := self._reason_to_refuse(request, share):
                    return Refused(code="invalid", reason=reason)
            case TenantDelete(tenant_id=tenant):
                if before is None:
                    reason = f"tenant {tenant} is not configured: `resile tenant list` lists those that are"
                    return Refused(code="unknown", reason=reason)
        if share != before:
            self._store(event.request.tenant_id, share, now=now)
        newest = (*self._record.applied_commands, event.command)[-MAX_COMMANDS:]
        self._record = self._record.model_copy(update={"applied_commands": newest})
        return Accepted()

    def take_changes(self) -> list[StoreTenants]:
        """Return the changes that are not stored yet; each is returned once."""
        if self._record is self._stored:
            return []
        self._stored = self._record
        return [StoreTenants(self._record)]

    def _reason_to_refuse(self, request: TenantSet, share: TenantShare) -> str:
        tenants = self._record.tenants
        before = tenants.get(request.tenant_id)
        if before is None and len(tenants) >= MAX_TENANTS:
            return f"{MAX_TENANTS} tenants are configured already: delete one first (`resile tenant delete`)"
        if share.cap and share.quota > share.cap:
            return f"a quota of {share.quota} exceeds the cap of {share.cap} slots: change one of them"
        others = sum(other.quota for tenant, other in tenants.items() if tenant != request.tenant_id)
        num_slots = sum(len(host.slots) for host in self._pool.hosts.values() if host.is_alive)
        if share.quota > (before.quota if before else 0) and others + share.quota > num_slots:
            taken = f", of which other tenants have quotas for {others}" if others else ""
            return (
                f"a quota of {share.quota} exceeds the pool: it has {num_slots} slots{taken}; choose a smaller quota, "
                "or a weight"
            )
        return ""

    def _store(self, tenant: str, share: TenantShare | None, *, now: float) -> None:
        tenants = {name: other for name, other in self._record.tenants.items() if name != tenant}
        if share is not None:
            tenants[tenant] = share
        changes = {"tenants": tenants, "number": self._record.number + 1, "changed": at(now), "tenant": tenant}
        self._record = self._record.model_copy(update=changes)
        self._policy_choice.use_shares(tenants, f"tenant {tenant} {'changed' if share else 'deleted'}")


def _changed(before: TenantShare, request: TenantSet) -> TenantShare:
    return TenantShare(
        weight=before.weight if request.weight is None else request.weight,
        quota=before.quota if request.quota is None else request.quota,
        cap=before.cap if request.cap is None else request.cap,
    )
