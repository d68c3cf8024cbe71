"""The traces of starts: a job starts in the trace of the request for it, however long it waited for slots."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, get_current_span

from resile_shared.messages.allocations import Allocation
from resile_shared.telemetry.traces import begin, end, in_span, resumed


class JobStarts:
    """The traces of jobs that were submitted or resumed, and have not trained since."""

    def __init__(self) -> None:
        self._requests: dict[str, Context] = {}

    def requested(self, job: str) -> None:
        """Keep the current trace, in which ``job`` was submitted or resumed."""
        self._requests[job] = get_current()

    def forget(self, job: str) -> None:
        """Forget a job."""
        self._requests.pop(job, None)

    @contextmanager
    def continued(self, allocation: Allocation) -> Iterator[None]:
        """Put the storing of an allocation into the trace of the request, with a link to what led to it now."""
        job = allocation.job
        if not allocation.cold_start or not allocation.placements:
            self.forget(job)
        request = self._requests.get(job)
        cause = get_current_span().get_span_context()
        if request is None or get_current_span(request).get_span_context().trace_id == cause.trace_id:
            yield
            return
        links = (Link(cause),) if cause.is_valid else ()
        span = begin("start job that waited", request, links=links, job=job, generation=allocation.generation)
        with resumed(in_span(span)):
            try:
                yield
            finally:
                end(span)
