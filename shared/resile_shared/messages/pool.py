"""What all parts of a pool have to agree on: settings, the policy and tenants, and who leads."""

from pydantic import Field

from ..policies import MAX_QUOTA, MAX_WEIGHT, PolicyName
from .jobs import MAX_COMMANDS
from .message import CommandId, Count, Id, Message, Positive, Time, Version

MIN_DETECTION_SECONDS = 1.0
MAX_DETECTION_SECONDS = 3600.0
DEFAULT_KEEP_JOBS = 1000
DEFAULT_KEEP_DAYS = 90.0
MAX_KEEP_JOBS = 100_000


class PoolSettings(Message):
    """Settings of the whole pool. Every timeout that is about silence follows from ``detection_seconds``."""

    detection_seconds: float = Field(
        ge=MIN_DETECTION_SECONDS, le=MAX_DETECTION_SECONDS, description="silence after which somebody is lost"
    )

    keep_jobs: int = Field(
        default=DEFAULT_KEEP_JOBS, ge=0, le=MAX_KEEP_JOBS, description="the newest jobs that ended are kept"
    )
    keep_days: float = Field(
        default=DEFAULT_KEEP_DAYS,
        gt=0,
        le=36500,
        description="days for which ended jobs and departed hosts are kept",
    )
    version: Version = ""

    @property
    def beat_seconds(self) -> float:
        """How often hosts beat: two beats may be lost, and the third is not."""
        return self.detection_seconds / 3

    @property
    def lease_seconds(self) -> float:
        """How long a standby waits for a leader that is silent."""
        return self.detection_seconds * 2 / 3


class PolicyRecord(Message):
    """How jobs share the slots of the pool. The scheduler that leads stores it."""

    policy: PolicyName = PolicyName.FAIRSHARE
    preemption: bool = Field(default=True, description="whether a job may lose slots to another one")
    number: Count = Field(default=0, description="how often it was changed")
    changed: Time | None = Field(default=None, description="when it was changed last")
    applied_commands: tuple[CommandId, ...] = Field(
        default=(), max_length=MAX_COMMANDS, description="ids of the newest commands whose effect this record holds"
    )


class PolicyEvent(Message):
    """The pool's policy was changed; numbers rise by 1."""

    number: Count
    time: Time
    policy: PolicyName
    preemption: bool


MAX_TENANTS = 1000


class TenantShare(Message):
    """A tenant's share of the slots. A tenant that is not configured has the defaults."""

    weight: int = Field(default=1, ge=1, le=MAX_WEIGHT, description="slots are divided in proportion to weights")
    quota: int = Field(
        default=0, ge=0, le=MAX_QUOTA, description="slots that it gets before others, if its jobs can use them"
    )
    cap: int = Field(default=0, ge=0, le=MAX_QUOTA, description="slots that its jobs never exceed together; 0: no cap")


class TenantsRecord(Message):
    """The tenants of the pool that are configured. The scheduler that leads stores it."""

    tenants: dict[Id, TenantShare] = Field(default_factory=dict, max_length=MAX_TENANTS)
    number: Count = Field(default=0, description="how often they were changed")
    changed: Time | None = Field(default=None, description="when they were changed last")
    tenant: Id | None = Field(default=None, description="which one was changed last")
    applied_commands: tuple[CommandId, ...] = Field(
        default=(), max_length=MAX_COMMANDS, description="ids of the newest commands whose effect this record holds"
    )


class TenantEvent(Message):
    """A tenant was changed, or deleted if ``share`` is null; numbers rise by 1."""

    number: Count
    time: Time
    tenant: Id
    share: TenantShare | None


class Lease(Message):
    """Held by the scheduler that decides. Taking it raises the epoch, by compare-and-set."""

    epoch: Positive
    holder: Id
    counter: Count = Field(description="the holder raises it; unchanged for too long means that it is gone")
    position: Count = Field(
        default=0, description="sequence of the newest report whose effects are stored: the next leader goes on there"
    )
    is_released: bool = Field(default=False, description="the holder ended, and nobody has to wait for it")
