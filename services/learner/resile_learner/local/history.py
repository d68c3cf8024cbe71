"""What is kept of a run for good: its numbered history, and the form in which its state is told as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self


@dataclass(frozen=True)
class HistoryItem:
    """One change of a run: an allocation that took effect, or the end."""

    number: int
    time: float
    """Seconds since the epoch."""
    kind: str
    generation: int
    workers: int
    slots: tuple[str, ...]
    iteration: int
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Return the item as `resile job --json` shows it."""
        return {
            "number": self.number,
            "time": timestamp(self.time),
            "kind": self.kind,
            "generation": self.generation,
            "workers": self.workers,
            "slots": list(self.slots),
            "iteration": self.iteration,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned. Raises KeyError or ValueError if it is something else."""
        fields = {**item, "time": datetime.fromisoformat(item["time"]).timestamp(), "slots": tuple(item["slots"])}
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


def timestamp(seconds: float) -> str:
    """ISO 8601 in UTC with milliseconds, as in ``2026-01-02T03:04:05.678Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
