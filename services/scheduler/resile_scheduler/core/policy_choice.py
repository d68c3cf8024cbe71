"""Which policy the operators of the pool have chosen. It is stored, so that every later scheduler keeps it."""

from collections.abc import Mapping

from resile_shared.messages.commands import Accepted, PoolPolicy, Refused
from resile_shared.messages.jobs import MAX_COMMANDS
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyRecord, TenantShare
from resile_shared.policies import PolicyName

from ..policies.demand import RankedPolicy
from ..policies.preemption import without_preemption
from ..policies.rooms import within_rooms
from ..policies.tenants import by_tenant
from .decisions import Decisions
from .events import PolicyChangeRequested, StorePolicy


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
        self._decisions.change_policy(chosen, cause)
