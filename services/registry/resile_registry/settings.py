"""The settings of the registry."""

from pydantic import Field

from resile_shared.settings import DetectionSeconds, ServiceSettings


class RegistrySettings(ServiceSettings):
    """Settings of the registry."""

    detection_seconds: DetectionSeconds = Field(
        default=3.0,
        description="silence after which a host or worker is lost, three heartbeat intervals",
    )
