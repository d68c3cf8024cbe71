"""One trace for a failure in a generation, whichever agents notice it: its id follows from the generation's allocation.

So the end of a worker's process on one host and the suspicions of its peers on others stand in one place. What is known
of a job outlives its stay on this host: its last workers may fail, or be killed, when it is over.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span

from resile_shared.telemetry.trace_ids import agreed, of_failure
from resile_shared.telemetry.traces import in_span

MAX_JOBS = 1000
MAX_GENERATIONS = 8


@dataclass
class _Job:
    allocated: dict[int, int] = field(default_factory=dict)
    """The traces in which its newest generations were allocated."""
    trained: int = 0
    """The newest generation in which workers of this host trained; 0: none."""
    failed: int | None = None
    """The generation of the newest failure that was noticed here."""
    failure: Context = field(default_factory=Context)
    """The first span about it."""


class FailureTraces:
    """For each job, the trace of a failure in a generation."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    def on_allocated(self, job: str, generation: int, trace: int) -> None:
        """Note in which trace a generation was allocated."""
        allocated = self._job(job).allocated
        allocated[generation] = trace
        for old in sorted(allocated)[:-MAX_GENERATIONS]:
            del allocated[old]

    def on_trained(self, job: str, generation: int) -> None:
        """Note that workers of this host train in a generation."""
        known = self._job(job)
        known.trained = max(generation, known.trained)

    def generation(self, job: str) -> int:
        """Return the generation in which workers of this host trained, or else the one in which they should."""
        known = self._job(job)
        return known.trained or max(known.allocated, default=0)

    def of(self, job: str, generation: int) -> Context:
        """Return the trace of a failure, which may be about to begin."""
        known = self._job(job)
        if known.failed == generation:
            return known.failure
        cause = known.allocated.get(generation)
        return agreed(cause, job, generation) if cause else of_failure()

    def add(self, job: str, generation: int, span: Span) -> None:
        """Have what follows of the same failure be below ``span``, if it is the first one."""
        known = self._job(job)
        if known.failed != generation:
            known.failed, known.failure = generation, in_span(span)

    def _job(self, job: str) -> _Job:
        known = self._jobs.setdefault(job, _Job())
        self._jobs.move_to_end(job)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        return known
