"""The settings of a monitor."""

from ipaddress import ip_address
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from resile_shared.errors import UsageError
from resile_shared.settings import ServiceSettings


class MonitorSettings(ServiceSettings):
    """The settings of one monitor."""

    storage: str = Field(description="URL of the pool's object storage")
    api_host: str = Field(default="127.0.0.1", description="address that the HTTP API listens on")
    api_port: int = Field(default=0, ge=0, le=65535, description="its port; 0: any")
    url_file: Path | None = Field(default=None, description="file to write the URL of the API to, once it listens")
    token_file: Path | None = Field(default=None, description="file with the token that requests must carry")
    agent_credentials: Path | None = Field(
        default=None, description="file that lets agents onto the bus: machines that join get what it holds"
    )
    max_package_bytes: int = Field(default=100 << 20, gt=0, description="the largest package that is taken")
    source_seconds: float = Field(
        default=10.0, gt=0, le=600, description="how long the source of a dataset may take to answer a request"
    )
    trace_url: str = Field(
        default="", description="where a collector shows a trace, such as http://127.0.0.1:16686/trace/{trace}"
    )
    webhook_seconds: float = Field(default=10.0, gt=0, le=60, description="how long a webhook may take to answer")
    webhook_pause_seconds: float = Field(
        default=5.0, gt=0, le=900, description="pause after its first failed attempt; each further one is twice as long"
    )

    @field_validator("trace_url")
    @classmethod
    def _has_a_place_for_the_trace(cls, url: str) -> str:
        if url and not (url.startswith(("http://", "https://")) and "{trace}" in url):
            raise ValueError("must begin with http:// or https://, and contain {trace}")
        return url

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if not (is_loopback(self.api_host) or self.token_file):
            raise ValueError(
                f"--api-host {self.api_host} opens the API to other machines: set --token-file, or use 127.0.0.1"
            )
        return self

    def read_token(self) -> str | None:
        """Return the token that requests must carry, None for none. Raises UsageError."""
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--token-file: {self.token_file} cannot be read: {error}") from error
        if not _is_token(token):
            raise UsageError(f"--token-file: {self.token_file} must hold at least 16 visible ASCII characters")
        return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _is_token(text: str) -> bool:
    return len(text) >= 16 and text.isascii() and text.isprintable() and " " not in text
