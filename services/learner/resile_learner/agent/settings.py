"""Settings of the agent."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from resile_shared.messages.hosts import LOCATION_LABELS
from resile_shared.messages.message import Id
from resile_shared.settings import DetectionSeconds, ServiceSettings
from resile_shared.text import is_line

from ..datasets.host_datasets import MAX_BYTES


def own_name() -> str:
    """Return this machine's name as a host's id."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "host"


def _check_labels(text: str) -> str:
    parse_labels(text)
    return text


def parse_labels(text: str) -> dict[str, str]:
    """Read ``gpu=h200,zone=a``. Raises ValueError."""
    labels = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not (name and equals and value and is_line(part)):
            raise ValueError(f"{part!r} is not a label: use name=value, with commas between labels")
        labels[name.strip()] = value.strip()
    return labels


def location_of(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return where a host is, as zone and rack; empty strings where its labels do not say."""
    return tuple(labels.get(name, "") for name in LOCATION_LABELS)


class LearnerSettings(ServiceSettings):
    """Settings of an agent."""

    folder: Path = Field(description="the agent's own folder: its incarnation, unpacked packages, output on its way")
    storage: str = Field(min_length=1, description="URL of the pool's object storage")
    host: Id = Field(default_factory=own_name, description="id of this host in its pool")
    slots: int | None = Field(default=None, ge=1, le=9999, description="without it: all devices, or else all cores")
    slots_per_gpu: int = Field(default=1, ge=1, le=64, description="how many workers share an accelerator")
    labels: Annotated[str, AfterValidator(_check_labels)] = Field(default="", description="as in 'gpu=h200,zone=a'")
    detection_seconds: DetectionSeconds | None = Field(
        default=None, description="must equal that of the pool, which is the default"
    )
    data_cache_bytes: int = Field(default=MAX_BYTES, ge=0, description="most that fetched datasets take on the disk")
    address: str = Field(default="127.0.0.1", description="where workers of other hosts reach those of this one")

    @property
    def host_id(self) -> str:
        """The id of its host."""
        return self.host
