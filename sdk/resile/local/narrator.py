"""What the user is shown of a run, made from what the pool stores and what workers report."""

from collections.abc import Iterable, Iterator, Sequence

from resile_scheduler.policies.plan import PlanStep
from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_shared.messages.reports import CheckpointSaved, Failed, Progress, Ready, Report, Switched

from .events import Noted, Progressed, Rescaled, RunEvent, Saved, TrainingCalled


def _fewer_workers(asked: int, ready: Ready) -> str:
    return (
        f"{ready.num_shards} of {asked} workers train: a batch of {ready.batch_size} is cut into so many shards "
        "(num_shards in the training call)"
    )


class Narrator:
    """Follows one run."""

    def __init__(self, steps: Sequence[PlanStep]) -> None:
        self.progress: Progress | None = None
        """The newest progress that was reported."""
        self.members: tuple[int, ...] = ()
        """The workers that train, the lowest rank first; none before training begins."""
        self._generation = 0
        self._steps = steps
        self._ready: Ready | None = None
        self._num_workers = 0
        self._saved = (0, 0)
        self._pause_seconds: dict[int, float] = {}
        self._failures: list[Failed] = []

    def on_report(self, report: Report) -> Iterator[RunEvent]:
        """Show what a worker reported."""
        match report.content:
            case Progress() as progress:
                self.progress = progress
                yield Progressed(progress, self._num_workers)
            case CheckpointSaved(lineage=lineage, iteration=iteration) as checkpoint:
                if (lineage, iteration) > self._saved:  # of a pause it is repeated
                    self._saved = lineage, iteration
                    yield Saved(checkpoint)
            case Switched(workers=workers, pause_seconds=seconds):
                self._pause_seconds[report.generation] = seconds
                if report.generation > self._generation:
                    self._generation, self.members = report.generation, tuple(workers)
            case Failed() as failed:
                self._failures.append(failed)
            case _:
                pass

    def on_record(self, record: JobRecord, items: Iterable[HistoryItem]) -> Iterator[RunEvent]:
        """Show what is new in a stored record and, by ``items``, in its history."""
        if record.ready and record.ready != self._ready:
            self._ready = record.ready
            yield TrainingCalled(record.ready)
            total = record.ready.iterations_total
            without_effect = [s for s in self._steps if record.ready.has_fixed_length and s.iteration >= max(total, 1)]
            for step in without_effect:
                yield Noted(f"step {step} of the plan has no effect: training ends at iteration {total}")
            most = max((step.workers for step in self._steps if step not in without_effect), default=0)
            if most > record.ready.num_shards and not record.ready.is_fast:
                yield Noted(_fewer_workers(most, record.ready))
        for item in items:
            yield from self._on_history(item)

    def traceback_of(self, reason: str) -> str:
        """Return the traceback of the failure that ``reason`` tells of, if a worker reported one."""
        return next((f.details for f in reversed(self._failures) if f.message and f.message in reason), "")

    def _on_history(self, item: HistoryItem) -> Iterator[RunEvent]:
        details = self.traceback_of(item.reason)
        note = Noted(f"{item.reason}\n{details.rstrip()}" if details else item.reason)
        if item.kind == "allocation":
            seconds = self._pause_seconds.get(item.generation, 0.0)
            before, self._num_workers = self._num_workers, item.workers
            yield Rescaled(item.generation, before, item.workers, item.iteration, seconds, item.reason)
            if details:
                yield note
        elif item.kind == "queued" and self._num_workers:
            self._num_workers = 0
            yield note
        elif item.kind == "warning":
            yield note
