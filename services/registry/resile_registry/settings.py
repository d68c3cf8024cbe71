"""The settings of the registry."""

from pydantic import Field

from resile_shared.messages.pool import DEFAULT_KEEP_DAYS, DEFAULT_KEEP_JOBS, MAX_KEEP_JOBS, PoolSettings
from resile_shared.settings import DetectionSeconds, ServiceSettings
from resile_shared.version import VERSION


class RegistrySettings(ServiceSettings):
    """Settings of the registry."""

    detection_seconds: DetectionSeconds = Field(
        default=3.0,
        description="silence after which a host or worker is lost, three heartbeat intervals",
    )
    keep_jobs: int = Field(
        default=DEFAULT_KEEP_JOBS, ge=0, le=MAX_KEEP_JOBS, description="how many ended jobs are kept"
    )
    keep_days: float = Field(
        default=DEFAULT_KEEP_DAYS, gt=0, description="days for which ended jobs and departed hosts are kept"
    )

    @property
    def pool(self) -> PoolSettings:
        """The settings that it stores for all services."""
        return PoolSettings(
            detection_seconds=self.detection_seconds,
            keep_jobs=self.keep_jobs,
            keep_days=self.keep_days,
            version=VERSION,
        )
