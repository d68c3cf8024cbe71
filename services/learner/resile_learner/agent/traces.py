"""Assigns what happens on this host to traces.

An allocation is carried out in the trace in which it was written, and what the job's workers do about it belongs to the
same trace: they start, reach their training call, form the generation, leave. What the agent publishes about that
carries the trace on. Everything else that a worker does begins a trace of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span

from resile_shared.messages.allocations import Allocation
from resile_shared.telemetry import begin, resumed, traced

from ..messages import FromWorker, Joined, Left, Order, Ready, Switched, WorkerListening
from ..processes.runner import Key
from .events import (
    AllocationGone,
    Command,
    Event,
    KillWorker,
    MessageReceived,
    SendToWorker,
    StartWorker,
    UnwatchAllocation,
    WorkerExited,
)

_ABOUT_AN_ALLOCATION = (WorkerListening, Ready, Joined, Switched, Left)


@dataclass
class _Forming:
    generation: int
    span: Span | None


class Traces:
    """Keeps the trace of each job's newest allocation, and the spans of what takes longer than one event."""

    def __init__(self) -> None:
        self._contexts: dict[str, Context] = {}
        self._starting: dict[Key, tuple[Context, Span]] = {}
        self._forming: dict[str, _Forming] = {}
        self._killed: dict[Key, Context] = {}

    @contextmanager
    def following(self, event: Event, commands: Sequence[Command], context: Context) -> Iterator[None]:
        """Run the block, which carries out ``commands``, in the trace of ``event``.

        ``context`` is the trace in which the event was received.
        """
        self._end_spans(event)
        context = self._cause_of(event, context)
        with resumed(context), _span_of(event) if commands else nullcontext():
            if isinstance(event, Allocation) and commands:
                self._contexts[event.job] = get_current()
            self._begin_spans(commands)
            yield

    def _cause_of(self, event: Event, context: Context) -> Context:
        """Return the trace that led to an event; an empty one if the event begins a trace."""
        match event:
            case MessageReceived(job, message):
                return self._contexts.get(job, Context()) if isinstance(message, _ABOUT_AN_ALLOCATION) else Context()
            case WorkerExited(job, worker, exit_):
                killed = self._killed.pop((job, worker), None)
                left = self._contexts.get(job) if exit_.kind == "left" else None
                return killed or left or Context()
            case _:
                return context

    def _begin_spans(self, commands: Sequence[Command]) -> None:
        """Begin the spans of what takes longer than one event, in the current trace; forget jobs that leave."""
        for command in commands:
            match command:
                case StartWorker(job, worker):
                    span = begin("start worker", job=job, worker=worker)
                    self._starting[job, worker] = get_current(), span
                case KillWorker(job, worker):
                    self._killed[job, worker] = get_current()
                case SendToWorker(job, _, Order(generation=generation)):
                    self._ordered(job, generation)
                case UnwatchAllocation(job):
                    self._forget(job)
                case _:
                    pass

    def _ordered(self, job: str, generation: int) -> None:
        forming = self._forming.get(job)
        if forming is None or forming.generation < generation:
            self._formed(job)
            self._forming[job] = _Forming(generation, begin("form generation", job=job, generation=generation))

    def _end_spans(self, event: Event) -> None:
        """End the spans that ``event`` completes."""
        match event:
            case MessageReceived(job, message):
                self._on_message(job, message)
            case WorkerExited(job, worker):
                self._end_start((job, worker))
            case AllocationGone(job):
                self._forget(job)
            case _:
                pass

    def _on_message(self, job: str, message: FromWorker) -> None:
        match message:
            case WorkerListening(worker=worker) if started := self._end_start((job, worker)):
                span = begin("run script to training call", started, job=job, worker=worker)
                self._starting[job, worker] = started, span
            case Ready(worker=worker):
                self._end_start((job, worker))
            case Joined(generation=generation) | Switched(generation=generation):
                forming = self._forming.get(job)
                if forming and generation >= forming.generation:
                    self._formed(job)
            case Left():
                self._formed(job)
            case _:
                pass

    def _end_start(self, key: Key) -> Context | None:
        """End the span of a worker's start; return the trace that it belongs to."""
        context, span = self._starting.pop(key, (None, None))
        if span is not None:
            span.end()
        return context

    def _forget(self, job: str) -> None:
        self._contexts.pop(job, None)
        self._forming.pop(job, None)

    def _formed(self, job: str) -> None:
        forming = self._forming.get(job)
        if forming and forming.span:
            forming.span.end()
            forming.span = None


def _span_of(event: Event) -> AbstractContextManager[object]:
    """Return a span for events that deserve one."""
    match event:
        case Allocation(job=job, generation=generation):
            return traced("carry out allocation", job=job, generation=generation)
        case WorkerExited(job, worker, exit_):
            return traced("worker is gone", job=job, worker=worker, how=exit_.kind)
        case _:
            return nullcontext()
