"""The pool as handlers see it: its state, and commands to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pydantic import BaseModel

from resile_shared.bus import subjects
from resile_shared.bus.buckets import Entry
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import Credentials
from resile_shared.bus.envelope import Malformed
from resile_shared.bus.subjects import (
    EVENTS,
    HOSTS,
    JOBS,
    LEASE,
    LEASE_KEY,
    POLICY,
    POLICY_KEY,
    TENANTS,
    TENANTS_KEY,
    USAGE,
    BucketSpec,
    InvalidSubject,
)
from resile_shared.http.api import (
    CurvesView,
    HostView,
    JobList,
    JobSummary,
    JobView,
    PolicyView,
    TenantList,
    TenantView,
)
from resile_shared.messages.commands import (
    Accepted,
    ExplainJobs,
    JobExplanations,
    PoolPolicy,
    PoolSuspend,
    TenantDelete,
    TenantSet,
)
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord
from resile_shared.messages.message import MAX_INTEGER
from resile_shared.messages.pool import PolicyRecord, TenantShare
from resile_shared.messages.usage import RemovedUsage
from resile_shared.storage.objects import ObjectStorage

from ..changes import TracedItem
from ..history.curve_store import CurveStore
from ..history.slot_store import SlotStore
from ..kept_traces import Traces
from ..metrics import MonitorMetrics
from ..projection import Projection
from ..storage_probe import StorageProbe
from ..views import curves_view
from .problems import ProblemError

ANSWER_SECONDS = 5.0
MAX_HISTORY = 1000
"""The most items of a history in one answer."""
EXPLAIN_SECONDS = 0.5
"""Time limit for the reasons of the newest decision: an answer without them is better than a late one."""

Entity = Literal["job", "host", "pool", "tenant"]
M = TypeVar("M", bound=BaseModel)
V = TypeVar("V", bound=JobSummary)


@dataclass
class Pool:
    """Everything that handlers use."""

    bus: Bus
    storage: ObjectStorage
    projection: Projection
    curves: CurveStore
    slots: SlotStore
    max_package_bytes: int
    source_seconds: float = 10.0
    """Seconds in which the source of a dataset must answer a request."""
    admission: Credentials | None = None
    """Bus credentials for agents of other machines; None: no machine may join."""
    trace_url: str = ""
    """Where a collector shows a trace, with ``{trace}`` for its id; empty: nowhere."""
    has_caught_up: bool = False
    """Whether the projection holds all that was stored when the monitor started."""
    metrics: MonitorMetrics = field(default_factory=MonitorMetrics)
    traces: Traces = field(default_factory=Traces)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the monitor stops: all event streams end."""
    storage_probe: StorageProbe = field(init=False)

    def __post_init__(self) -> None:
        self.storage_probe = StorageProbe(self.storage)

    async def record(self, job: str) -> JobRecord:
        """Return what is stored of a job. Raises ProblemError when there is none."""
        if self.projection.record(job) is None:
            await self._fetch_job(job)  # it may be newer than what has reached the projection
        if record := self.projection.record(job):
            return record
        raise ProblemError("unknown", f"there is no job {job}: GET /v1/jobs (`resile jobs`) lists them")

    async def job(self, job: str) -> JobView:
        """Return all about one job. Raises ProblemError when there is none."""
        record = await self.record(job)
        history: tuple[HistoryItem, ...] = record.unpublished
        with suppress(ProblemError):  # what is known without the bus is shown without it
            history = await self.history(record)
        view = self.projection.job(record, history)
        return (await self._explained((view,)))[0]

    async def history(self, record: JobRecord, *, before: int = MAX_INTEGER) -> tuple[HistoryItem, ...]:
        """Return the newest items of a job's history with numbers below ``before``, as many as an answer has room for.

        Items that ``record`` does not hold as unpublished were published before it was stored.
        """
        return tuple(traced.item for traced in await self.traced_history(record, before=before))

    async def traced_history(self, record: JobRecord, *, before: int = MAX_INTEGER) -> tuple[TracedItem, ...]:
        """Return the same items as `history`, each with its trace."""
        if not self.bus.is_up:
            raise ProblemError("unavailable", "the bus is disconnected: try again")
        events = self.bus.read_stream(EVENTS, JobEvent, subject=subjects.job_events(record.job))
        async with bus_timeout("the bus does not respond: try again"):
            newest = await events.newest()
            num_published = newest.message.item.number if newest else 0
            page = await events.page(MAX_HISTORY, skip=max(0, num_published + 1 - before))
        published = (TracedItem(event.message.item, event.trace) for event in page)
        items = {traced.item.number: traced for traced in (*map(TracedItem, record.unpublished), *published)}
        return tuple(items[number] for number in sorted(items) if number < before)[-MAX_HISTORY:]

    async def is_over(self, job: str) -> bool:
        """Whether the event that ends a job is published, or the job is deleted. Waits while NATS is disconnected."""
        record = self.projection.record(job)
        if record is None or not record.state.is_final:
            return record is None
        try:
            newest = await self.bus.read_stream(EVENTS, JobEvent, subject=subjects.job_events(job)).newest()
        except Malformed:
            return True
        if newest is not None:
            return newest.message.item.number >= record.num_items
        oldest = await self.bus.read_stream(EVENTS, model_of).first_after(0)
        ended = record.ended or record.submitted
        return oldest is not None and oldest.stored is not None and oldest.stored > ended  # newer ones have replaced it

    async def job_curves(self, job: str) -> CurvesView:
        """Return the curves of an existing job."""
        async with bus_timeout("the bus does not respond: try again"):
            return curves_view(await self.curves.curves(job))

    async def jobs(self) -> JobList:
        """Return all jobs, in the order of their submission."""
        return JobList(jobs=await self._explained(self.projection.jobs().jobs))

    async def _explained(self, views: tuple[V, ...]) -> tuple[V, ...]:
        """Replace the reasons of active jobs by those of the scheduler's newest decision, if it replies in time.

        Otherwise, and for jobs that share no slots, the reason is that of the history.
        """
        if all(view.state.is_final for view in views):
            return views
        reply = await self.bus.query(subjects.EXPLAIN_JOBS, ExplainJobs(), JobExplanations, seconds=EXPLAIN_SECONDS)
        reasons = {} if reply is None else reply.reasons
        return tuple(
            view if view.state.is_final else view.model_copy(update={"reason": reasons.get(view.id, view.reason)})
            for view in views
        )

    async def host(self, host: str) -> HostView:
        """Return all about one host. Raises ProblemError when there is none."""
        if self.projection.host(host) is None:
            await self._fetch_host(host)
        if view := self.projection.host(host):
            return view
        raise ProblemError("unknown", f"there is no host {host}: GET /v1/hosts (`resile hosts`) lists them")

    async def ask(
        self,
        entity: Literal["job", "host"],
        verb: str,
        request: BaseModel,
        *,
        target: str = "",
        key: str | None,
    ) -> Accepted:
        """Send a command and wait until its effect is visible; return the answer.

        With a ``key`` the command takes effect once. A key is specific to one verb and one target.
        """
        answer = await self._accepted(entity, verb, request, target=target, key=key)
        target = answer.job_id or target
        with suppress(ProblemError):  # it has happened, whether or not it can be seen already
            await (self._fetch_host(target) if entity == "host" else self._fetch_job(target))
        return answer

    async def suspend(self, *, key: str | None) -> tuple[str, ...]:
        """Suspend all jobs; return those that still hold slots."""
        async with bus_timeout(_timeout_detail("pool", key)):
            lease = await self.bus.bucket(LEASE).get(LEASE_KEY)
        if lease is None:
            raise ProblemError("unavailable", "no scheduler has ever led this pool: try again")
        request = PoolSuspend(epoch=lease.value.epoch)
        return (await self._accepted("pool", "suspend", request, target="", key=key)).jobs

    async def policy(self) -> PolicyView:
        """Return how jobs share slots."""
        entry = await self._stored(POLICY, POLICY_KEY)
        record = entry.value if entry else PolicyRecord()
        return PolicyView(policy=record.policy, preemption=record.preemption)

    async def change_policy(self, command: PoolPolicy, *, key: str | None) -> PolicyView:
        """Change how jobs share slots; return the new policy."""
        await self._accepted("pool", "policy", command, target="", key=key)
        return await self.policy()

    async def tenants(self) -> TenantList:
        """Return the tenants that are configured, and those that have jobs."""
        entry = await self._stored(TENANTS, TENANTS_KEY)
        configured = entry.value.tenants if entry else {}
        active = [job for job in self.projection.jobs().jobs if not job.state.is_final]
        return TenantList(
            tenants=tuple(
                TenantView(
                    id=name,
                    weight=configured.get(name, TenantShare()).weight,
                    quota=configured.get(name, TenantShare()).quota,
                    cap=configured.get(name, TenantShare()).cap,
                    is_configured=name in configured,
                    jobs=sum(job.tenant == name for job in active),
                    workers=sum(job.workers for job in active if job.tenant == name),
                )
                for name in sorted({*configured, *(job.tenant for job in active)})
            )
        )

    async def change_tenant(
        self, verb: Literal["set", "delete"], command: TenantSet | TenantDelete, *, key: str | None
    ) -> TenantList:
        """Change what a tenant gets; return all tenants after the change."""
        await self._accepted("tenant", verb, command, target=command.tenant_id, key=key)
        return await self.tenants()

    async def removed_usage(self) -> tuple[RemovedUsage, ...]:
        """Return what the removed jobs of each tenant have used."""
        async with bus_timeout("the bus does not respond: try again"):
            entries = await self.bus.bucket(USAGE).entries()
        return tuple(entry.value for entry in entries.values())

    async def _accepted(
        self, entity: Entity, verb: str, request: BaseModel, *, target: str, key: str | None
    ) -> Accepted:
        """Send a command; return the answer. Raises ProblemError if it is refused, or late."""
        message_id = f"{entity}.{verb}:{target}:{key}" if key else None
        async with bus_timeout(_timeout_detail(entity, key)):
            answer = await self.bus.ask(subjects.command(entity, verb), request, message_id=message_id)
        if not isinstance(answer, Accepted):
            raise ProblemError(answer.code, answer.reason)
        return answer

    async def _fetch_job(self, job: str) -> None:
        if entry := await self._stored(JOBS, job):
            self.projection.store_job(job, entry.value, revision=entry.revision)

    async def _fetch_host(self, host: str) -> None:
        if entry := await self._stored(HOSTS, host):
            self.projection.store_host(host, entry.value, revision=entry.revision)

    async def _stored(self, bucket: BucketSpec[M], key: str) -> Entry[M] | None:
        async with bus_timeout("the bus does not respond: try again"):
            with suppress(InvalidSubject):
                return await self.bus.bucket(bucket).get(key)
        return None


@asynccontextmanager
async def bus_timeout(detail: str) -> AsyncIterator[None]:
    """Limit the time for responses over the bus. Raises ProblemError with ``detail``."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except TimeoutError:
        raise ProblemError("unavailable", detail) from None


def _timeout_detail(entity: Entity, key: str | None) -> str:
    who = "registry" if entity == "host" else "scheduler"
    advice = (
        "send it again with the same Idempotency-Key"
        if key
        else "check before you send it again, or use an Idempotency-Key"
    )
    return f"the {who} does not respond; the request may still take effect later: {advice}"
