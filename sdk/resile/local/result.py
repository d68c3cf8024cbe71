"""How a local run ended and what came of it."""

from dataclasses import dataclass
from typing import Any, Literal

from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_shared.messages.reports import Completed, Progress


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``is_usage_error``: what was asked for was impossible, and nothing broke."""

    state: Literal["completed", "failed", "stopped"]
    error: str = ""
    details: str = ""
    """The traceback, where there is one."""
    is_usage_error: bool = False


@dataclass(frozen=True)
class Result:
    """All there is to know about a run that has ended."""

    record: JobRecord
    history: tuple[HistoryItem, ...]
    """Every change of the run, also before it was resumed."""
    name: str
    outcome: Outcome
    min_workers: int
    max_workers: int
    seconds: float
    progress: Progress | None
    model: str | None
    """Path or URL of the trained model."""
    logs: str
    output: str | None
    """The folder with what workers wrote to ``RESILE_OUTPUT_DIR``; None: nothing, or a folder of the user's own."""
    can_resume: bool
    """Whether there is a complete checkpoint."""

    @property
    def job(self) -> str:
        """The run's id."""
        return self.record.job

    @property
    def completed(self) -> Completed | None:
        """What training ended with."""
        return self.record.completed

    @property
    def _iterations_total(self) -> int | None:
        """An estimate as long as the batch may change."""
        if self.completed and self.completed.batches:
            return self.completed.iteration
        newest = self.progress.iterations_total if self.progress else None
        return newest or (self.record.ready.iterations_total if self.record.ready else None)

    @property
    def _bits(self) -> str | None:
        """Nothing is promised of a run that failed, since its bits may be the reason."""
        if self.completed:
            return self.completed.bits
        has_trained = self.progress is not None and self.progress.iteration > 0
        is_known = has_trained and self.outcome.state != "failed"
        return self.record.ready.bits if self.record.ready and is_known else None

    def as_json(self) -> dict[str, Any]:
        """Return what `resile job --json` prints of a job, with the ledger inside."""
        record, completed = self.record, self.completed
        last = completed or self.progress
        sizes = [item.workers for item in self.history if item.kind == "allocation"]
        return {
            "id": record.job,
            "name": self.name,
            "state": self.outcome.state,
            "error": self.outcome.error or None,
            "priority": record.priority,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "workers": sizes[-1] if sizes else 0,
            "generation": record.generation,
            "iteration": last.iteration if last else 0,
            "iterations_total": self._iterations_total,
            "epoch": last.epoch if last else 0,
            "samples_seen": last.samples_seen if last else 0,
            "loss": last.loss if last else None,
            "params_sha256": completed.params_sha256 if completed else None,
            "history": [item.model_dump(mode="json") for item in self.history],
            "ledger": {"epochs": [count.model_dump() for count in completed.ledger] if completed else []},
            "batches": [step.model_dump() for step in completed.batches] if completed else [],
            "metrics": last.metrics if last else {},
            "validation": last.validation if last else {},
            "model": self.model,
            "output": self.output,
            "bits": self._bits,
        }
