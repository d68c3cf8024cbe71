"""Settings of a service: frozen, from flags, else from the environment (``RESILE_...``), else defaults."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from .errors import UsageError
from .messages.pool import MAX_DETECTION_SECONDS, MIN_DETECTION_SECONDS
from .validation import describe_fault, phrase

PREFIX = "RESILE_"
DetectionSeconds = Annotated[float, Field(ge=MIN_DETECTION_SECONDS, le=MAX_DETECTION_SECONDS)]


class ServiceSettings(BaseSettings):
    """What every service is told. A service's own class adds its fields."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_prefix=PREFIX, cli_kebab_case=True, cli_exit_on_error=False
    )

    credentials: Path = Field(description="file with the bus's URL, user and password")
    health_host: str = Field(default="127.0.0.1", description="address of /healthz and /readyz")
    health_port: int | None = Field(default=None, ge=0, le=65535, description="its port; 0: any; without it: none")
    health_file: Path | None = Field(default=None, description="file to write their URL to, once they answer")
    supervised: bool = Field(
        default=False, description="end when stdin does, and leave signals to the process that started this one"
    )
    log_format: Literal["plain", "json"] = Field(default="plain", description="form of the log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")

    @property
    def host_id(self) -> str:
        """The id of the host that the service belongs to; empty: it is one of the whole pool."""
        return ""


S = TypeVar("S", bound=ServiceSettings)


def load(settings: type[S], *, program: str, arguments: Sequence[str] | None = None) -> S:
    """Read the settings. Raises UsageError that names every fault; ``--help`` prints the flags and exits."""
    flags = list(sys.argv[1:] if arguments is None else arguments)
    sources: dict[str, Any] = {"_cli_parse_args": flags, "_cli_prog_name": program}
    try:
        return settings(**sources)
    except ValidationError as error:
        faults = [_fault(fault["loc"], fault["msg"]) for fault in error.errors(include_url=False)]
        raise UsageError(f"{program} cannot start with these settings: {'; '.join(faults)}") from error
    except SettingsError as error:
        raise UsageError(f"{program}: {str(error).removeprefix('error parsing CLI: ')}") from error


def _fault(location: tuple[int | str, ...], message: str) -> str:
    """Name a setting the way it is given (``--health-port or RESILE_HEALTH_PORT``), and what is wrong with it."""
    if not location:
        return phrase(message)
    field, *rest = (str(part) for part in location)
    inside = f" ({'.'.join(rest)})" if rest else ""
    return describe_fault(f"--{field.replace('_', '-')} or {PREFIX}{field.upper()}{inside}", message)
