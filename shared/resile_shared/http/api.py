"""The models of the HTTP API below ``/v1``, for the monitor and its clients.

Unlike messages on the bus they may gain fields: readers ignore unknown ones.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..messages.commands import MAX_SECONDS
from ..messages.datasets import MAX_URI, Dataset
from ..messages.hosts import HostState
from ..messages.jobs import MAX_PRIORITY, HistoryItem, JobState
from ..messages.message import HostAddress, Id, Line, Message, Port, SlotName, Time, Version
from ..messages.reports import BatchStep, EpochCount
from ..messages.webhooks import WebhookEvent, WebhookSecret, WebhookUrl
from ..policies import MAX_QUOTA, MAX_WEIGHT, PolicyName

_YEAR_2100 = 4_102_444_800


class View(BaseModel):
    """Base class of all responses."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class JobSummary(View):
    """One job, as lists show it."""

    id: str
    name: str
    tenant: str
    state: JobState
    reason: str = Field(description="why it is in this state, or waits")
    priority: int
    min_workers: int
    max_workers: int
    workers: int = Field(description="members of the active generation; 0 while the job does not train")
    slots: tuple[SlotName, ...] = Field(description="of the active generation")
    generation: int
    iteration: int
    iterations_total: int | None = Field(description="an estimate if the job declared a range of batches")
    epoch: int
    epochs: int | None
    samples_seen: int
    loss: float | None
    metrics: dict[str, float]
    validation: dict[str, float]
    iteration_seconds: float | None = Field(description="of the newest iteration; null before the first")
    seconds_left: float | None = Field(
        description="at the average speed of the active generation; null while the job does not train"
    )
    deadline: Time | None = None
    meets_deadline: bool | None = Field(
        default=None,
        description="whether it met its deadline, or is expected to at its average speed; null: none, or unknown",
    )
    submitted: Time
    bits: str | None = Field(
        description="'same bits', 'fast', or 'bits not guaranteed: <operation>'; null if the job failed"
    )
    params_sha256: str | None = Field(description="null before the end")


class JobView(JobSummary):
    """One job, with its history."""

    script: str
    args: tuple[str, ...]
    group: str
    sizes: tuple[int, ...] = Field(default=(), description="allowed numbers of workers; empty: any")
    placement: str = Field(default="pack", description="'pack': on few hosts; 'spread': on many")
    gang: bool = Field(default=False, description="its workers run one script as torchrun would start it")
    restartable: bool = Field(default=False, description="of a gang: whether it may be ended and started again")
    settings: dict[str, str] = Field(
        default_factory=dict,
        description="what was chosen at the submission beyond script, limits, priority, tenant and deadline, as text "
        "by the name of the field; of 'env' the names alone, since values may be secrets",
    )
    checkpoint: int | None = Field(description="iteration of the newest complete checkpoint")
    exchange_path: str = Field(
        default="", description="how its workers exchange gradients, in words; empty: one worker, or unknown"
    )
    warnings: tuple[str, ...] = ()
    has_model: bool = Field(
        default=False,
        description="whether its training has ended, with a file of the model; true also if it failed later",
    )
    details: str = Field(default="", description="the traceback of a failed job, where there is one")
    history: tuple[HistoryItem, ...] = Field(description="the newest 1000 items; GET /v1/jobs/{job}/history has all")
    history_length: int = Field(
        default=0, description="number of items in the whole history, which is the number of the newest"
    )
    ledger: tuple[EpochCount, ...] = Field(default=(), description="known at the end")
    batches: tuple[BatchStep, ...] = Field(
        default=(), description="of a job that declared a range, known at its end: its bits depend on them"
    )


class HistoryPage(View):
    """Some items of a job's history, in order. Older ones are before the number of the first."""

    items: tuple[HistoryItem, ...]


class JobList(View):
    """All jobs, in the order of their submission."""

    jobs: tuple[JobSummary, ...]


class CurveTableView(View):
    """Numbers by iteration: columns of equal length, at most 500 long."""

    iterations: tuple[int, ...]
    times: tuple[int, ...] = Field(description="milliseconds since the epoch")
    workers: tuple[int | None, ...]
    iterations_per_second: tuple[float | None, ...] = Field(description="since the point before")
    values: dict[str, tuple[float | None, ...]] = Field(description="by name; null: not reported at that iteration")


class CurvesView(View):
    """The curves of one job, thinned: each point is a report as it was."""

    training: CurveTableView = Field(description="'loss' and metrics")
    validation: CurveTableView = Field(description="scores, by the last iteration of the epoch")


class LedgerView(View):
    """How often each epoch's samples were used by committed iterations."""

    epochs: tuple[EpochCount, ...]


class SlotView(View):
    """One slot, and what runs on it."""

    name: SlotName
    device: str
    job: str | None
    worker: int | None
    worker_state: str | None


class HostView(View):
    """One host."""

    id: str
    state: HostState
    reason: str
    incarnation: int
    address: str
    labels: dict[str, str]
    device_class: str
    slots: tuple[SlotView, ...]
    since: Time


class HostList(View):
    """All hosts that ever joined, by name."""

    hosts: tuple[HostView, ...]


ChangeKind = Literal["start", "resize", "recovery", "pause", "checkpoint", "end", "other"]


class ChangeView(View):
    """One change of a job: what one cause led to."""

    number: int | None = Field(description="number of the first history item that belongs to it; null: none does")
    items: tuple[int, ...] = Field(description="the numbers of all items of the history that belong to it")
    kind: ChangeKind
    time: Time
    seconds: float | None = Field(description="from its cause to the first iteration after it; null: unknown")
    generation: int
    iteration: int
    workers_before: int
    workers: int = Field(description="after it")
    reason: str
    summary: str = Field(description="in words; its times are UTC, as everywhere")
    trace: str | None = Field(description="the trace of its steps; null: unknown")
    has_spans: bool = Field(description="whether GET /v1/traces/{trace} still has its steps")
    url: str | None = Field(default=None, description="where a collector shows the trace; null: --trace-url is not set")


class ChangeList(View):
    """The changes of a job, oldest first."""

    changes: tuple[ChangeView, ...]


class TraceSpan(View):
    """One step of a change."""

    id: str
    parent: str | None = Field(description="null: the change began with this step, or with an unknown one")
    name: str
    service: str
    begin: float = Field(description="seconds since the epoch")
    seconds: float
    attributes: dict[str, bool | int | float | str]
    events: tuple[dict[str, Any], ...]
    links: tuple[str, ...] = Field(description="related traces")
    error: str | None


class TraceView(View):
    """The steps of one change, in the order in which they began."""

    id: str
    spans: tuple[TraceSpan, ...]
    dropped: int = Field(description="number of steps that were dropped for lack of room")


class NewAttack(Message):
    """The body of ``POST /v1/traces/{trace}/attacks``."""

    attack: Line = Field(min_length=1, description="what was done, as in `kill worker job-1/3`")
    job: Id = Field(description="the job that the change is about")
    begin: float = Field(ge=0, le=_YEAR_2100, allow_inf_nan=False, description="seconds since the epoch")
    seconds: float = Field(default=0.0, ge=0, le=86400, allow_inf_nan=False, description="how long it lasted")


class EventView(View):
    """One event of the bus, as stored."""

    stream: Literal["events", "reports", "progress", "logs"]
    sequence: int
    time: Time
    subject: str
    data: dict[str, Any]


class EventList(View):
    """Some events, in the order of the stream."""

    events: tuple[EventView, ...]


class LogEntry(View):
    """One line that a worker or the build of its environment printed, or a note that lines were dropped."""

    sequence: int
    time: Time
    host: str
    worker: int | None
    """The worker that printed the line; None: the build of the job's environment on the host."""
    stream: Literal["stdout", "stderr", "note"]
    text: str


class LogList(View):
    """Some lines, in order."""

    lines: tuple[LogEntry, ...]


class Submission(View):
    """The response to ``POST /v1/jobs``, whose body is a `messages.jobs.JobSpec`. The job is stored."""

    id: str = Field(description="of the job")
    warning: str = Field(default="", description="why no host that is up can run it, so that it waits")


class NewPriority(Message):
    """The body of ``POST /v1/jobs/{job}/priority``."""

    priority: int = Field(ge=1, le=MAX_PRIORITY, description="a higher number means a larger share")


class StopJob(Message):
    """The body of ``POST /v1/jobs/{job}/stop``; it is optional."""

    reason: Line = Field(default="", max_length=1000)


class DrainHost(Message):
    """The body of ``POST /v1/hosts/{host}/drain``; it is optional."""

    deadline_seconds: float | None = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        description="after this time the remaining workers are ended and their jobs recover; null: never",
    )


class JoinHost(Message):
    """The body of ``POST /v1/hosts/{host}/join``. A later version may send more: it is answered with the pool's."""

    model_config = ConfigDict(extra="ignore")

    incarnation: int = Field(
        default=0, ge=0, description="the newest that this machine knows of: a host may come back, but not join twice"
    )
    version: Version = Field(default="", description="of Resile on this machine; without it the host is refused")
    address: HostAddress | None = Field(default=None, description="of its workers; null: not tried")
    port: Port | None = Field(default=None, description="on which it says `nonce` while it asks, to whoever connects")
    nonce: str = Field(default="", max_length=64)


class Peer(View):
    """A host that a new one should reach."""

    host: Id
    address: str
    port: int = Field(description="on which its agent says the name of the host")


class Admission(View):
    """The answer to ``POST /v1/hosts/{host}/join``: what the host's agent needs to enter the pool. Keep it secret."""

    bus_url: str = Field(description="an address of this machine (127.0.0.1) means the machine that answered")
    bus_user: str
    bus_password: str
    storage: str = Field(description="URL of the pool's object storage")
    probe: str = Field(
        description="content of the storage's object `probe`: a host that reads anything else does not share it"
    )
    version: Version = Field(default="", description="of Resile that the pool runs, and so must its hosts")
    peers: tuple[Peer, ...] = Field(default=(), description="some of the hosts that are up")


class Suspension(View):
    """The answer to ``POST /v1/pool/suspend``."""

    jobs: tuple[str, ...] = Field(description="those that still hold slots: ask again until there are none")


class PolicyView(View):
    """How jobs share the slots of the pool."""

    policy: PolicyName
    preemption: bool = Field(description="whether a job may lose slots to another one")
    policies: dict[PolicyName, str] = Field(
        default={policy: policy.description for policy in PolicyName}, description="all policies, and what each does"
    )


class NewPolicy(Message):
    """How slots are shared from now on; what is left out stays as it is."""

    policy: PolicyName | None = None
    preemption: bool | None = None


class TenantView(View):
    """One tenant: what it gets of the slots, and what it has."""

    id: str
    weight: int = Field(description="slots are divided among tenants in proportion to weights")
    quota: int = Field(description="slots that it gets before others, if its jobs can use them")
    cap: int = Field(default=0, description="slots that its jobs never exceed together; 0: no cap")
    is_configured: bool = Field(description="whether it was configured; otherwise it is the default")
    jobs: int = Field(description="its jobs that have not ended")
    workers: int = Field(description="members of their active generations")


class TenantList(View):
    """The tenants that are configured, and those that have jobs, by name."""

    tenants: tuple[TenantView, ...]


class NewTenant(Message):
    """The body of ``PUT /v1/tenants/{tenant}``; what is left out stays as it is."""

    weight: int | None = Field(default=None, ge=1, le=MAX_WEIGHT)
    quota: int | None = Field(default=None, ge=0, le=MAX_QUOTA)
    cap: int | None = Field(default=None, ge=0, le=MAX_QUOTA, description="0: no cap")


class JobUsageView(View):
    """What one job has used."""

    id: str
    name: str
    slot_hours: float
    slots: int = Field(description="that it holds now")


class TenantUsageView(View):
    """What the jobs of one tenant have used."""

    tenant: str
    slot_hours: float = Field(description="of all its jobs, including removed ones")
    removed_slot_hours: float = Field(description="the part that removed jobs have used")
    slots: int = Field(description="that they hold now")
    jobs: tuple[JobUsageView, ...] = Field(description="those that have used something, in the order of submission")


class UsageView(View):
    """What was used, by tenant and job: slots times the time for which they were held."""

    since: Time | None = Field(description="the beginning of an hour; null: all that was ever used")
    until: Time
    tenants: tuple[TenantUsageView, ...] = Field(description="by name")


class ModelView(View):
    """The final model of a job whose training has ended; ``GET /v1/jobs/{job}/model`` sends the file."""

    job: str
    name: str
    tenant: str
    state: JobState = Field(
        default=JobState.COMPLETED,
        description="'failed' or 'stopped': that happened after its training; else its script still runs",
    )
    reason: str = Field(default="", description="why it failed or was stopped after its training")
    completed: Time = Field(description="when the job ended; before that, when it was submitted")
    iterations: int
    samples_seen: int
    loss: float | None
    metrics: dict[str, float]
    validation: dict[str, float]
    params_sha256: str
    bits: str
    script: str
    args: tuple[str, ...]


class ModelList(View):
    """All models, newest first."""

    models: tuple[ModelView, ...]


class NewWebhook(Message):
    """The body of ``POST /v1/webhooks``."""

    url: WebhookUrl
    events: tuple[WebhookEvent, ...] = Field(default=("completed", "failed"), min_length=1, max_length=3)
    secret: WebhookSecret | None = Field(
        default=None, description="whsec_ and 24 to 64 bytes in base64; null: a new one"
    )


class WebhookView(View):
    """One receiver that the pool calls when a job ends, and how its deliveries go."""

    id: str
    url: str
    events: tuple[str, ...]
    created: Time
    num_delivered: int
    num_given_up: int = Field(description="events that were given up after their last attempt")
    attempts: int = Field(description="so far, to deliver the next event; 0: none is waiting for another attempt")
    retry_at: Time | None = Field(description="when the next attempt is due")
    last_attempt: Time | None
    last_error: str = Field(description="of the newest attempt; empty if it succeeded")


class WebhookCreated(WebhookView):
    """The answer to ``POST /v1/webhooks``."""

    secret: str = Field(description="the receiver checks signatures with it; it is shown nowhere else")


class WebhookList(View):
    """All webhooks, in the order of their creation."""

    webhooks: tuple[WebhookView, ...]


class NewDataset(Message):
    """The body of ``PUT /v1/datasets/{dataset}``."""

    uri: str = Field(min_length=1, max_length=MAX_URI, description="file://, s3://, gs://, az:// or pool:FOLDER")


class DatasetList(View):
    """All datasets, in the order of their names."""

    datasets: tuple[Dataset, ...]


class Empty(Message):
    """Nothing: the body of ``/pause``, ``/resume`` and ``/suspend``, which is optional; the answer to commands."""


class PackageView(View):
    """The answer to ``POST /v1/packages``."""

    package: str = Field(description="for JobSpec.package; the same content has the same name")


class Problem(View):
    """Any failure, as RFC 9457 defines it (``application/problem+json``)."""

    type: str = "about:blank"
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str = Field(description="one line: what is wrong, and what to do")
    code: Literal[
        "malformed",
        "invalid",
        "unknown",
        "conflict",
        "unavailable",
        "unauthorized",
        "too large",
        "timeout",
        "internal",
        "failed",
        "busy",
        "lost",
        "late",
    ]
