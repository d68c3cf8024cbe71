"""What the registry is told at its start."""

from pydantic import Field

from resile_shared.settings import ServiceSettings


class RegistrySettings(ServiceSettings):
    """Settings of the registry."""

    detection_seconds: float = Field(
        default=3.0, ge=1.5, le=3600.0, description="silence after which a host is lost; hosts beat once a second"
    )
