"""Requests and their replies.

Commands change something: ``resile.command.<entity>.<verb>``. Queries do not: ``resile.query.<entity>.<verb>``.
"""

from typing import Annotated, Literal

from pydantic import Field, RootModel

from ..policies import MAX_QUOTA, MAX_WEIGHT, PolicyName
from .jobs import MAX_PRIORITY, MAX_WORKERS, JobSpec
from .message import Id, Message, Positive, Text

MAX_SECONDS = 10 * 365 * 86400


class JobSubmit(Message):
    """``job.submit``: train this. The answer names the job, which is stored by then."""

    spec: JobSpec


class JobPriority(Message):
    """``job.priority``: a higher number means a larger share."""

    job_id: Id
    priority: int = Field(ge=1, le=MAX_PRIORITY)


class JobStop(Message):
    """``job.stop``: end it for good."""

    job_id: Id
    reason: Text = ""


class JobPause(Message):
    """``job.pause``: checkpoint, give up all slots, and wait."""

    job_id: Id


class JobResume(Message):
    """``job.resume``: a paused job queues again."""

    job_id: Id


class PoolSuspend(Message):
    """``pool.suspend``: all jobs checkpoint, give up their slots and queue; none starts while this scheduler leads.

    The answer names those that hold slots. Repeated until it names none, since another scheduler may take over. That
    one refuses what was meant for the scheduler before it: such a request may be late, and the pool run again.
    """

    epoch: Positive = Field(description="of the scheduler that is meant, by the lease")


class PoolPolicy(Message):
    """``pool.policy``: from now on slots are shared like this."""

    policy: PolicyName | None = Field(default=None, description="null: unchanged")
    preemption: bool | None = Field(
        default=None, description="whether a job may lose slots to another one; null: unchanged"
    )


class TenantSet(Message):
    """``tenant.set``: from now on the tenant has this share of the slots; what is null stays as it is."""

    tenant_id: Id
    weight: int | None = Field(default=None, ge=1, le=MAX_WEIGHT)
    quota: int | None = Field(default=None, ge=0, le=MAX_QUOTA, description="in slots")
    cap: int | None = Field(default=None, ge=0, le=MAX_QUOTA, description="in slots; 0: no cap")


class TenantDelete(Message):
    """``tenant.delete``: the tenant has the defaults again."""

    tenant_id: Id


class JobDelete(Message):
    """``job.delete``: remove a job that has ended, with everything stored for it."""

    job_id: Id


class HostDrain(Message):
    """``host.drain``: jobs leave the host at an iteration boundary; it gets no new workers.

    It stays so until `HostUndrain`, or until the host leaves: an agent that is killed does not end a drain.
    """

    host_id: Id
    deadline_seconds: float | None = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        description="after this time the remaining workers are ended and their jobs recover; null: never",
    )


class HostUndrain(Message):
    """``host.undrain``: the host takes workers again; one that is lost takes them when it is back."""

    host_id: Id


class Accepted(Message):
    """It is stored and will happen."""

    kind: Literal["accepted"] = "accepted"
    job_id: Id | None = Field(default=None, description="of a submitted job")
    warning: Text = Field(default="", description="of a submitted job: why no host that is up can run it")
    jobs: tuple[Id, ...] = Field(
        default=(), max_length=MAX_WORKERS, description="of `pool.suspend`: those that still hold slots"
    )


class Refused(Message):
    """Nothing was changed. ``reason`` says what is wrong and what to do."""

    kind: Literal["refused"] = "refused"
    code: Literal["malformed", "invalid", "unknown", "conflict", "unavailable"]
    reason: Text


ID_REUSED = Refused(code="conflict", reason="another request had the same id or Idempotency-Key: use a new one")
"""The answer to a request that has the id of another one."""


class CommandResponse(RootModel[Annotated[Accepted | Refused, Field(discriminator="kind")]]):
    """The answer to a command."""


MAX_JOBS = 100_000


class ExplainJobs(Message):
    """``jobs.explain``: why does each job have what it has, or what is it waiting for? Replied to by the leader."""


class JobExplanations(Message):
    """The reasons of the newest decision, by job; a job that shares no slots now has none."""

    reasons: dict[Id, Text] = Field(default_factory=dict, max_length=MAX_JOBS)
