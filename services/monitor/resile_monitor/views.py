"""How jobs, hosts, models and usage are shown: by records, and by what was reported beside these."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from resile_shared.http.api import (
    CurvesView,
    CurveTableView,
    HostView,
    JobSummary,
    JobUsageView,
    JobView,
    ModelList,
    ModelView,
    SlotView,
    TenantUsageView,
    UsageView,
)
from resile_shared.messages.curves import Curves, CurveTable
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, Slot, WorkerReport
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.reports import Failed, Progress, Report
from resile_shared.messages.services import Service
from resile_shared.messages.usage import HOUR_MS, RemovedUsage, hour_of, used_since

from .history.curves import speeds

ENOUGH_ITERATIONS = 5
_TRAINING = (JobState.RUNNING, JobState.RESCALING, JobState.RECOVERING)
_SHOWN_APART = frozenset(
    ("name", "package", "script", "args", "min_workers", "max_workers", "priority", "tenant", "deadline")
)
_CREDENTIALS = re.compile(r"//[^/\s]*@")
"""The user and the password in a URL, as in a requirement ``package @ git+https://user:token@host/package``."""
_ALIVE = (HostState.UP, HostState.DRAINING)


@dataclass
class JobReports:
    """What the workers of one job have reported, as far as it counts."""

    generation: int = 0
    """The generation of ``progress``."""
    progress: Progress | None = None
    time: datetime | None = None
    """When ``progress`` was reported, on the clock of its host."""
    first: Report | None = None
    """The first progress of ``generation`` from the host of ``progress``: the clocks of hosts differ."""
    failed: Failed | None = None
    exit_details: str = ""
    """The traceback that an agent found where a worker could not report one."""
    warnings: dict[str, None] = field(default_factory=dict)

    def on_progress(self, report: Report, progress: Progress) -> None:
        """Note the newest progress."""
        before = self.first
        if before is None or (before.generation, before.host) != (report.generation, report.host):
            self.first = report
        self.generation, self.progress, self.time = report.generation, progress, report.time


def job_summary(record: JobRecord, reports: JobReports) -> JobSummary:
    """Return one job as lists show it."""
    spec, ready = record.spec, record.ready
    newest = record.completed or reports.progress
    slots = active_slots(record)
    iteration = _iteration(record, reports)
    total = _iterations_total(record, reports)
    pace = _pace(reports)
    seconds_left = max(0, total - iteration) * pace if slots and pace and total is not None else None
    return JobSummary(
        id=record.job,
        name=spec.name,
        tenant=spec.tenant,
        state=record.state,
        reason=record.reason,
        priority=record.priority,
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        workers=len(slots),
        slots=slots,
        generation=record.generation,
        iteration=iteration,
        iterations_total=total,
        epoch=newest.epoch if newest else 0,
        epochs=ready.epochs if ready else None,
        samples_seen=newest.samples_seen if newest else 0,
        loss=newest.loss if newest else None,
        metrics=newest.metrics if newest else {},
        validation=newest.validation if newest else {},
        iteration_seconds=reports.progress.iteration_seconds or None if reports.progress else None,
        seconds_left=seconds_left,
        deadline=spec.deadline,
        meets_deadline=_meets_deadline(record, reports, seconds_left),
        submitted=record.submitted,
        bits=_bits(record),
        params_sha256=(record.completed.params_sha256 or None) if record.completed else None,
    )


def job_view(record: JobRecord, reports: JobReports, history: Sequence[HistoryItem]) -> JobView:
    """Return all about one job, with the part of its history that is shown."""
    spec = record.spec
    details = (reports.failed and reports.failed.details) or reports.exit_details
    return JobView(
        **dict(job_summary(record, reports)),
        script=spec.script,
        args=spec.args,
        group=spec.group,
        sizes=spec.sizes,
        placement=spec.placement,
        gang=spec.gang,
        restartable=spec.restartable,
        settings=settings_of(spec),
        checkpoint=record.checkpoint.iteration if record.checkpoint else None,
        exchange_path=reports.progress.exchange_path if reports.progress else "",
        warnings=tuple(reports.warnings),
        has_model=has_model(record),
        details=details if record.state is JobState.FAILED else "",
        history=tuple(history),
        history_length=record.num_items,
        ledger=record.completed.ledger if record.completed else (),
        batches=record.completed.batches if record.completed else (),
    )


def settings_of(spec: JobSpec) -> dict[str, str]:
    """Return what was chosen at the submission and is not shown apart, as text by the name of the field."""
    fields = {name: field for name, field in JobSpec.model_fields.items() if name not in _SHOWN_APART}
    chosen = {name: getattr(spec, name) for name in fields}
    return {
        name: _text(value)
        for name, value in chosen.items()
        if value != fields[name].get_default(call_default_factory=True)
    }


def _text(value: object) -> str:
    """Return a value of a spec as people read it; of a mapping only the keys, of a dataset its name, no credentials."""
    match value:
        case bool():
            return "yes" if value else "no"
        case Dataset():
            return value.name
        case Service():
            share = f"{value.per_replica:g} requests in flight for each replica"
            return f"class {value.class_name}, {value.concurrency} at a time, {share}"
        case Mapping() | tuple():
            return ", ".join(map(_text, value))
        case str() | int() | float():
            return _CREDENTIALS.sub("//***@", str(value))
    return type(value).__name__


def curves_view(curves: Curves) -> CurvesView:
    """Return the curves of one job."""
    return CurvesView(training=_table_view(curves.training), validation=_table_view(curves.validation))


def _table_view(table: CurveTable) -> CurveTableView:
    return CurveTableView(
        iterations=table.iterations,
        times=table.times,
        workers=table.workers,
        iterations_per_second=speeds(table),
        values=table.values,
    )


def host_view(record: HostRecord, beat: Heartbeat | None, holders: Mapping[str, str]) -> HostView:
    """Return one host; ``holders`` names the job of each active slot, for a host that has sent no heartbeat yet."""
    is_alive = record.state in _ALIVE
    if beat is not None and beat.incarnation == record.incarnation:
        running = {worker.slot: worker for worker in beat.workers if worker.state != "gone" and is_alive}
        holders = {}
    else:
        running = {}
    return HostView(
        id=record.host,
        state=record.state,
        reason=record.reason,
        incarnation=record.incarnation,
        address=record.address,
        labels=record.labels,
        device_class=record.device_class,
        slots=tuple(
            _slot_view(record.host, slot, running.get(slot.index), holders if is_alive else {}) for slot in record.slots
        ),
        since=record.since,
    )


def active_slots(record: JobRecord) -> tuple[str, ...]:
    """Return the slots of the generation that trains; none while the job does not."""
    return record.allocation.slots if record.allocation and record.state in _TRAINING else ()


def _slot_view(host: str, slot: Slot, worker: WorkerReport | None, holders: Mapping[str, str]) -> SlotView:
    name = f"{host}/{slot.index}"
    return SlotView(
        name=name,
        device=slot.device,
        job=worker.job if worker else holders.get(name),
        worker=worker.worker if worker else None,
        worker_state=worker.state if worker else None,
    )


def _pace(reports: JobReports) -> float | None:
    """Return the seconds of an iteration, on average over the reported generation since single ones vary."""
    progress, first = reports.progress, reports.first
    if progress is None:
        return None
    if first and isinstance(first.content, Progress) and reports.time:
        num, seconds = progress.iteration - first.content.iteration, (reports.time - first.time).total_seconds()
        if num >= ENOUGH_ITERATIONS and seconds > 0:
            return seconds / num
    return progress.iteration_seconds or None


def _meets_deadline(record: JobRecord, reports: JobReports, seconds_left: float | None) -> bool | None:
    """Return whether the job was complete by its deadline, or is expected to be; None: no deadline, or not known."""
    deadline = record.spec.deadline
    if deadline is None:
        return None
    if record.state.is_final:
        return record.state is JobState.COMPLETED and record.ended is not None and record.ended <= deadline
    if seconds_left is None or reports.time is None:
        return None
    return (deadline - reports.time).total_seconds() >= seconds_left


def _iteration(record: JobRecord, reports: JobReports) -> int:
    """Return how many iterations are committed, by the report of the newest generation."""
    if record.completed:
        return record.completed.iteration
    last = record.allocation
    settled = (last.generation, last.iteration) if last else (0, 0)
    told_last = (reports.generation, reports.progress.iteration) if reports.progress else (0, 0)
    return max(settled, told_last)[1]


def _iterations_total(record: JobRecord, reports: JobReports) -> int | None:
    """Return how many iterations there are, as far as is known: where the batch may change, by the newest report."""
    if record.completed and record.completed.batches:
        return record.completed.iteration
    newest = reports.progress.iterations_total if reports.progress else None
    return newest or (record.ready.iterations_total if record.ready else None)


def _bits(record: JobRecord) -> str | None:
    """Return what is promised of the job's bits; nothing if it failed, since its bits may be the reason."""
    if record.completed:
        return record.completed.bits
    return record.ready.bits if record.ready and record.state is not JobState.FAILED else None


def has_model(record: JobRecord) -> bool:
    """Whether there is a model: its training has ended with a file of it, whatever became of the job since then."""
    return record.completed is not None and record.completed.model is not None


def models(records: Iterable[JobRecord]) -> ModelList:
    """Return the models of jobs whose training has ended, the newest first."""
    found = [view for record in records if (view := _model(record)) is not None]
    return ModelList(models=tuple(sorted(found, key=lambda view: (view.completed, view.job), reverse=True)))


def _model(record: JobRecord) -> ModelView | None:
    done = record.completed
    if done is None or not has_model(record):
        return None
    return ModelView(
        job=record.job,
        name=record.spec.name,
        tenant=record.spec.tenant,
        state=record.state,
        reason=record.reason,
        completed=record.ended or record.submitted,
        iterations=done.iteration,
        samples_seen=done.samples_seen,
        loss=done.loss,
        metrics=done.metrics,
        validation=done.validation,
        params_sha256=done.params_sha256,
        bits=done.bits,
        script=record.spec.script,
        args=record.spec.args,
    )


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
