"""What users are promised of the policy and of tenants, checked while a world runs.

A change that was accepted is stored, and decides from then on, whichever scheduler leads. Changes are published in
order, each once. No job gets workers beyond the cap of its tenant.
"""

from collections.abc import Callable
from typing import TypeVar

from resile_shared.bus.subjects import POLICY, TENANTS, pool_event
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.pool import PolicyEvent, PolicyRecord, TenantEvent, TenantsRecord

from .server import Stored

R = TypeVar("R", PolicyRecord, TenantsRecord)


class SharingChecks:
    """What was stored of the policy and of tenants so far. ``tenant_of`` returns the tenant of a job."""

    def __init__(self, break_promise: Callable[[str], None], tenant_of: Callable[[str], str]) -> None:
        self._break_promise = break_promise
        self._tenant_of = tenant_of
        self._policy = PolicyRecord()
        self._tenants = TenantsRecord()
        self._published = {POLICY.name: 0, TENANTS.name: 0}
        """The number of the newest change that was published of each."""
        self._applied: set[str] = set()
        """The ids of all requests whose effects were stored."""
        self._allocations: dict[str, Allocation] = {}

    def on_store(self, stored: Stored) -> None:
        """Look at a message that the bus has stored."""
        subject = stored.subject
        if subject in (POLICY.fence, TENANTS.fence) or stored.headers.get("KV-Operation"):
            return
        if subject.startswith(POLICY.prefix):
            self._policy = self._changed(self._policy, PolicyRecord.model_validate_json(stored.data))
        elif subject.startswith(TENANTS.prefix):
            self._tenants = self._changed(self._tenants, TenantsRecord.model_validate_json(stored.data))
        elif subject == pool_event("policy"):
            self._on_event(POLICY.name, PolicyEvent.model_validate_json(stored.data).number, self._policy)
        elif subject == pool_event("tenant"):
            self._on_event(TENANTS.name, TenantEvent.model_validate_json(stored.data).number, self._tenants)

    def on_allocation(self, allocation: Allocation) -> None:
        """Workers that are added are within the cap of the tenant; those that it had may be beyond a new one."""
        before = self._allocations.get(allocation.job)
        self._allocations[allocation.job] = allocation
        had = {placement.worker for placement in before.placements} if before else set()
        added = {placement.worker for placement in allocation.placements} - had
        tenant = self._tenant_of(allocation.job)
        share = self._tenants.tenants.get(tenant)
        if not added or share is None or not share.cap:
            return
        of_tenant = [each for job, each in self._allocations.items() if self._tenant_of(job) == tenant]
        num_slots = len({placement.slot_name for each in of_tenant for placement in each.placements})
        if num_slots > share.cap:
            self._break_promise(f"{allocation.job} gets {sorted(added)}: {tenant} has {num_slots} of {share.cap} slots")

    def answered(self, request: str) -> None:
        """A user was told that ``request`` has changed the policy or a tenant."""
        if request not in self._applied:
            self._break_promise(f"{request} was accepted, and is not stored")

    def is_published(self) -> bool:
        """Whether all changes are published."""
        return (self._policy.number, self._tenants.number) == tuple(self._published.values())

    def check_end(self, decides: tuple[PolicyRecord, TenantsRecord] | None) -> None:
        """Check that the leader ``decides`` by what is stored, and that all changes are published."""
        if decides is not None and decides != (self._policy, self._tenants):
            self._break_promise(f"the leader decides by {decides}, and {(self._policy, self._tenants)} is stored")
        for name, record in ((POLICY.name, self._policy), (TENANTS.name, self._tenants)):
            if self._published[name] != record.number:
                self._break_promise(f"{self._published[name]} of {record.number} changes of {name} are published")

    def _changed(self, before: R, record: R) -> R:
        self._applied.update(record.applied_commands)
        same = before.model_copy(update={"applied_commands": record.applied_commands})
        if record != same and record.number != before.number + 1:
            self._break_promise(f"after {before}, {record} is stored")
        return record

    def _on_event(self, name: str, number: int, record: PolicyRecord | TenantsRecord) -> None:
        if number != self._published[name] + 1 or number > record.number:
            self._break_promise(f"change {number} of {name} is published after {self._published[name]}")
        self._published[name] = max(number, self._published[name])
