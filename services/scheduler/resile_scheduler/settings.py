"""The settings of the scheduler."""

from pydantic import Field

from resile_shared.policies import POLICIES_HELP, PolicyName
from resile_shared.settings import DetectionSeconds, ServiceSettings


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    storage: str | None = Field(
        default=None, description="URL of the pool's object storage, from which deleted jobs are removed"
    )
    policy: PolicyName | None = Field(
        default=None, description=f"{POLICIES_HELP}; default: the one chosen last, at first fairshare"
    )
    preemption: bool | None = Field(
        default=None, description="whether a job may lose slots to another one; default: as chosen last, at first true"
    )
    detection_seconds: DetectionSeconds | None = Field(
        default=None, description="must equal that of the pool, which is the default"
    )
    lease_seconds: float | None = Field(
        default=None,
        ge=0.5,
        le=60.0,
        description="silence of the leader after which a standby takes over; default: two thirds of detection_seconds",
    )
