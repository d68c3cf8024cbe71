"""What the registry is told at its start."""

from pydantic import Field

from resile_shared.settings import DetectionSeconds, ServiceSettings


class RegistrySettings(ServiceSettings):
    """Settings of the registry."""

    detection_seconds: DetectionSeconds = Field(
        default=3.0, description="silence after which somebody is lost, in the whole pool; hosts beat three times in it"
    )
