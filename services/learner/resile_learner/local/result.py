"""How a local run ended and what came of it."""

from dataclasses import dataclass
from typing import Any

from ..messages import CheckpointSaved, Completed, Progress, Ready
from .history import HistoryItem
from .seam import Outcome

PRIORITY = 5000


@dataclass(frozen=True)
class Result:
    """All there is to know about a run that is over."""

    job: str
    name: str
    outcome: Outcome
    min_workers: int
    max_workers: int
    workers: int
    generation: int
    seconds: float
    ready: Ready | None
    progress: Progress | None
    checkpoint: CheckpointSaved | None
    completed: Completed | None
    history: tuple[HistoryItem, ...]
    model: str | None
    """Path or URL of the trained model."""
    logs: str
    can_resume: bool

    def as_json(self) -> dict[str, Any]:
        """Return what `resile job --json` shows of a job, and the end's results beside it."""
        last = self.completed or self.progress
        completed = self.completed
        ledger = [count.model_dump() for count in completed.ledger] if completed else []
        return {
            "id": self.job,
            "name": self.name,
            "state": self.outcome.state,
            "error": self.outcome.error or None,
            "priority": PRIORITY,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "workers": self.workers,
            "generation": self.generation,
            "iteration": last.iteration if last else 0,
            "iterations_total": self.ready.iterations_total if self.ready else None,
            "epoch": last.epoch if last else 0,
            "samples_seen": last.samples_seen if last else 0,
            "loss": last.loss if last else None,
            "params_sha256": completed.params_sha256 if completed else None,
            "history": [item.as_json() for item in self.history],
            "ledger": {"epochs": ledger},
            "metrics": last.metrics if last else {},
            "validation": last.validation if last else {},
            "model": self.model,
            "bits": completed.bits if completed else self.ready.bits if self.ready else None,
        }
