"""What the scheduler is told at its start."""

from pydantic import Field

from resile_shared.policies import POLICIES_HELP, PolicyName
from resile_shared.settings import DetectionSeconds, ServiceSettings


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    policy: PolicyName = Field(default=PolicyName.FAIRSHARE, description=POLICIES_HELP)
    detection_seconds: DetectionSeconds | None = Field(
        default=None, description="that of the pool, which is taken without it; another one is refused"
    )
    lease_seconds: float | None = Field(
        default=None,
        ge=0.5,
        le=60.0,
        description="how long a standby waits for a leader that is silent; without it: two thirds of detection_seconds",
    )
