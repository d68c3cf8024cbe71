"""What is kept of a run for good: its numbered history, and the form in which its state is told as JSON."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


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


def timestamp(seconds: float) -> str:
    """ISO 8601 in UTC with milliseconds, as in ``2026-01-02T03:04:05.678Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
