"""What the user is shown of a run, made from what the pool stores and what workers report."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from resile_scheduler.policies.plan import PlanStep
from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_shared.messages.reports import CheckpointSaved, Failed, Progress, Ready, Report, Switched

from .events import Noted, Progressed, Rescaled, RunEvent, Saved, TrainingCalled

KEPT = 256
"""The number of lines of each worker that are remembered."""


class LowestRankOutput:
    """Which lines that workers print to stdout stand for all: those of the lowest rank, each once.

    Workers print the same lines. One that is lost before it has printed a line that others have printed takes none
    along: they are shown once another worker is the lowest rank. And what that one still prints of the lines that were
    shown is not shown again.
    """

    def __init__(self) -> None:
        self._leader: int | None = None
        self._shown: deque[str] = deque(maxlen=KEPT)
        """The lines that were shown last."""
        self._others: dict[int, deque[str]] = {}
        """The newest lines of workers that are not the lowest rank."""
        self._repeated: deque[str] = deque()
        """What the lowest rank is going to print, and was shown already."""

    def follow(self, leader: int) -> list[str]:
        """From now on ``leader`` is the lowest rank; return what it has printed and was not shown."""
        if leader == self._leader:
            return []
        self._leader = leader
        own, shown = list(self._others.pop(leader, ())), list(self._shown)
        self._repeated = deque()
        if not own or not shown:
            return []
        if shown[-1] in own:
            missing = own[_last(own, shown[-1]) + 1 :]
            self._shown += missing
            return missing
        if own[-1] in shown:
            self._repeated.extend(shown[_last(shown, own[-1]) + 1 :])
        return []

    def printed(self, worker: int, line: str) -> bool:
        """Take a line that ``worker`` has printed; return whether it was shown already, as that of another worker."""
        if worker != self._leader:
            self._others.setdefault(worker, deque(maxlen=KEPT)).append(line)
            return False
        if self._repeated:
            if self._repeated.popleft() == line:
                return True
            self._repeated.clear()
        self._shown.append(line)
        return False


def _last(lines: list[str], line: str) -> int:
    return len(lines) - 1 - lines[::-1].index(line)


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
        self.lowest_rank: int | None = None
        """The worker whose output stands for all; None while nothing trains."""
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
                self.lowest_rank = workers[0]
                self._pause_seconds[report.generation] = seconds
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
