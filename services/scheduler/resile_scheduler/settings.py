"""What the scheduler is told at its start."""

from typing import Literal

from pydantic import Field

from resile_shared.settings import ServiceSettings


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    policy: Literal["fairshare", "priority"] = Field(
        default="fairshare", description="fairshare: slots in proportion to priorities; priority: the highest first"
    )
    lease_seconds: float = Field(
        default=2.0, ge=0.5, le=60.0, description="how long a standby waits for a leader that is silent"
    )
