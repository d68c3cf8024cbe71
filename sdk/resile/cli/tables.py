"""Jobs, hosts, history and events as text."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from resile_shared.text import printable

if TYPE_CHECKING:
    from resile_shared.http.api import EventView, HostView, JobSummary, JobView, LedgerView, TenantView, UsageView
    from resile_shared.messages.jobs import HistoryItem
    from resile_shared.messages.reports import BatchStep, EpochCount

_GAP = "  "


def columns(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Align ``rows`` below ``heading``, one line each."""
    lines = [heading, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def job_table(jobs: "Iterable[JobSummary]") -> Iterator[str]:
    """Show jobs, one line each."""
    heading = ("ID", "NAME", "STATE", "PRIORITY", "WORKERS", "ITERATION", "LOSS", "LEFT", "WHY")
    return columns(heading, (_job_row(job) for job in jobs))


def _job_row(job: "JobSummary") -> tuple[str, ...]:
    return (
        job.id,
        job.name,
        job.state.value,
        str(job.priority),
        str(job.workers),
        iterations(job),
        number(job.loss),
        clock(job.seconds_left) if job.seconds_left is not None else "-",
        job.reason,
    )


def job_details(job: "JobView") -> Iterator[str]:
    """Show one job and its history."""
    rows = [(label, value) for label, value in _details(job) if value]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        yield f"{label.ljust(width)}{_GAP}{printable(value)}"
    if job.details:
        yield from ("", *job.details.splitlines())
    if job.history:
        yield ""
        yield from history_table(job.history)


def _details(job: "JobView") -> Iterator[tuple[str, str]]:
    yield "job", job.id
    yield "name", job.name
    yield "state", job.state.value + (f": {job.reason}" if job.reason else "")
    yield "script", " ".join((job.script, *job.args))
    yield "submitted", moment(job.submitted)
    yield "tenant", job.tenant
    yield "priority", str(job.priority)
    yield "workers", f"{job.workers} (limits {job.min_workers} to {job.max_workers})"
    yield from ((name, value) for name, value in job.settings.items() if name not in ("gang", "restartable"))
    yield "gang", _gang(job)
    yield "deadline", _deadline(job)
    yield "slots", " ".join(job.slots)
    yield "generation", str(job.generation)
    yield "iteration", iterations(job)
    yield "epoch", f"{job.epoch}" + (f" of {job.epochs}" if job.epochs else "")
    yield "samples seen", str(job.samples_seen)
    yield "loss", number(job.loss)
    yield "metrics", _numbers(job.metrics)
    yield "validation", _numbers(job.validation)
    yield "time left", clock(job.seconds_left) if job.seconds_left is not None else ""
    yield "checkpoint", f"iteration {job.checkpoint}" if job.checkpoint is not None else ""
    yield "exchange", job.exchange_path
    yield from (("warning", warning) for warning in job.warnings)
    yield from (("ledger", line) for line in ledger_lines(job.ledger))
    yield "batches", batches_text(job.batches)
    yield "bits", job.bits or ""
    yield "params sha256", job.params_sha256 or ""


def _gang(job: "JobView") -> str:
    how = "starts again after a failure, and to make room" if job.restartable else "fails with any of its workers"
    return how if job.gang else ""


def _deadline(job: "JobView") -> str:
    if job.deadline is None:
        return ""
    if job.meets_deadline is None:
        return moment(job.deadline)
    word = "met" if job.meets_deadline else "missed"
    return f"{moment(job.deadline)}: {word}" if job.state.is_final else f"{moment(job.deadline)}: expected to be {word}"


def history_table(history: "Sequence[HistoryItem]") -> Iterator[str]:
    """Show the history of a job, one line each; the batch only if a policy chooses it."""
    has_batch = any(item.batch_size for item in history)
    batch = ("BATCH",) if has_batch else ()
    heading = ("NUMBER", "TIME", "KIND", "GENERATION", "WORKERS", *batch, "ITERATION", "WHY")
    return columns(
        heading,
        (
            (
                str(item.number),
                moment(item.time),
                item.kind,
                str(item.generation),
                str(item.workers),
                *((str(item.batch_size or "-"),) if has_batch else ()),
                str(item.iteration),
                item.reason,
            )
            for item in history
        ),
    )


def host_table(hosts: "Iterable[HostView]") -> Iterator[str]:
    """Show hosts, one line each."""
    heading = ("HOST", "STATE", "SLOTS", "BUSY", "ADDRESS", "LABELS", "SINCE", "WHY")
    return columns(
        heading,
        (
            (
                host.id,
                host.state.value,
                str(len(host.slots)),
                str(sum(slot.job is not None for slot in host.slots)),
                host.address,
                ",".join(f"{key}={value}" for key, value in sorted(host.labels.items())),
                moment(host.since),
                host.reason,
            )
            for host in hosts
        ),
    )


def tenant_table(tenants: "Iterable[TenantView]") -> Iterator[str]:
    """Show tenants, one line each."""
    heading = ("TENANT", "WEIGHT", "QUOTA", "CAP", "JOBS", "WORKERS")
    return columns(
        heading,
        (
            (tenant.id, *map(str, (tenant.weight, tenant.quota, tenant.cap or "-", tenant.jobs, tenant.workers)))
            for tenant in tenants
        ),
    )


def usage_table(usage: "UsageView") -> Iterator[str]:
    """Show what was used, one line for each tenant, followed by those of its jobs."""
    heading = ("TENANT", "JOB", "NAME", "SLOT-HOURS", "SLOTS")
    rows: list[Sequence[str]] = []
    for tenant in usage.tenants:
        rows.append((tenant.tenant, "", "", f"{tenant.slot_hours:.2f}", str(tenant.slots)))
        rows += [("", job.id, job.name, f"{job.slot_hours:.2f}", str(job.slots)) for job in tenant.jobs]
        if tenant.removed_slot_hours:
            rows.append(("", "removed jobs", "", f"{tenant.removed_slot_hours:.2f}", ""))
    return columns(heading, rows)


def ledger_table(ledger: "LedgerView") -> Iterator[str]:
    """Show how often the samples of each epoch were used, one line each."""
    heading = ("EPOCH", "SAMPLES", "ONCE", "MORE", "NEVER")
    return columns(
        heading, ([_epochs(e), *(str(n) for n in (e.samples, e.once, e.more, e.never))] for e in ledger.epochs)
    )


def ledger_lines(epochs: "Sequence[EpochCount]") -> Iterator[str]:
    """Return one line if every sample was used once, else one for each epoch with a deviation."""
    wrong = [count for count in epochs if count.more or count.never]
    if epochs and not wrong:
        yield "every sample exactly once in every epoch"
    for count in wrong:
        yield (
            f"epoch {_epochs(count)}: of {count.samples} samples {count.once} were used once, {count.more} more often, "
            f"{count.never} never"
        )


def _epochs(count: "EpochCount") -> str:
    """For example ``7``, or ``7-12`` if the counts are those of several epochs together."""
    last = count.epoch + count.num_epochs - 1
    return f"{count.epoch}-{last}" if count.num_epochs > 1 else f"{count.epoch}"


def event_line(event: "EventView") -> str:
    """Show one event."""
    return f"{moment(event.time)}{_GAP}{event.subject.removeprefix('resile.')}{_GAP}{_gist(event)}".rstrip()


def _gist(event: "EventView") -> str:
    """Return the content of an event, without what its subject already contains."""
    data = event.data
    if isinstance(item := data.get("item"), dict):
        workers = f"{item.get('workers')} workers at iteration {item.get('iteration')}"
        return _GAP.join(text for text in (workers, str(item.get("reason") or "")) if text)
    if isinstance(content := data.get("content"), dict):
        data = content
    fields = {key: value for key, value in data.items() if key not in ("kind", "time", "host", "slots", "labels")}
    return " ".join(f"{key}={value}" for key, value in fields.items() if isinstance(value, str | int | float) and value)


def batches_text(steps: "Sequence[BatchStep]") -> str:
    """For example ``0:64,120:256``, as `resile run --batches` takes it."""
    return ",".join(f"{step.iteration}:{step.batch_size}" for step in steps)


def iterations(job: "JobSummary") -> str:
    """For example ``50/120``."""
    return f"{job.iteration}/{job.iterations_total}" if job.iterations_total else str(job.iteration)


def number(value: float | None) -> str:
    """A loss or a metric, in few digits."""
    return "-" if value is None else f"{value:.4g}"


def count(number: int, thing: str) -> str:
    """For example ``1 host`` or ``2 hosts``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def moment(time: datetime) -> str:
    """Format a time in the local time zone."""
    return time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _numbers(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def clock(seconds: float) -> str:
    """For example ``7 s``, ``3:05`` or ``1:02:30``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
