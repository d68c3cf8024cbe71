"""What was used, by tenant and job, from the records of jobs and from what is kept of those that are removed."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from resile_shared.http.api import JobUsageView, TenantUsageView, UsageView
from resile_shared.messages.jobs import JobRecord
from resile_shared.messages.usage import RemovedUsage
from resile_shared.usage import HOUR_MS, hour_of, used_since


def usage_view(
    records: Iterable[JobRecord],
    removed: Iterable[RemovedUsage],
    *,
    tenant: str | None,
    hours: int | None,
    now: datetime,
) -> UsageView:
    """Return what was used in the last ``hours``, from the beginning of an hour on; None: ever.

    With ``tenant``, of this one alone.
    """
    since = hour_of(now - timedelta(hours=hours)) if hours is not None else None
    removed = tuple(removed)
    counted = {job for usage in removed for job in usage.jobs}
    jobs: dict[str, list[JobUsageView]] = {}
    for record in records:
        used = used_since(record.usage, since, now=now)
        if record.job not in counted and used:
            view = JobUsageView(
                id=record.job, name=record.spec.name, slot_hours=used / HOUR_MS, slots=record.usage.slots
            )
            jobs.setdefault(record.spec.tenant, []).append(view)
    of_removed = {usage.tenant: used_since(usage.used, since, now=now) / HOUR_MS for usage in removed}
    names = sorted({*jobs, *(name for name, used in of_removed.items() if used)})
    views = (_tenant_view(name, jobs.get(name, ()), of_removed.get(name, 0.0)) for name in names)
    return UsageView(since=since, until=now, tenants=tuple(view for view in views if tenant in (None, view.tenant)))


def _tenant_view(name: str, jobs: Iterable[JobUsageView], removed: float) -> TenantUsageView:
    jobs = tuple(jobs)
    return TenantUsageView(
        tenant=name,
        slot_hours=sum(job.slot_hours for job in jobs) + removed,
        removed_slot_hours=removed,
        slots=sum(job.slots for job in jobs),
        jobs=jobs,
    )
