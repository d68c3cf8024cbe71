"""Which trace belongs to what happens on this host.

An allocation is carried out in the trace in which it was written, and what the job's workers do about it goes on there:
they start, come to their training call, form the generation, leave. What the agent tells of that carries the trace on.
Everything else that a worker says or does begins a trace of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span

from resile_shared.messages.allocations import Allocation
from resile_shared.telemetry import begin, resumed, traced

from ..messages import FromWorker, Hello, Joined, Left, Order, Ready, Switched
from .events import AllocationGone, Command, Event, Exited, Kill, Said, Send, Start

Key = tuple[str, int]
_ABOUT_AN_ALLOCATION = (Hello, Ready, Joined, Switched, Left)


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
        """Put the block, which carries ``commands`` out, into the trace of ``event``.

        ``context`` is the one in which the event was heard of.
        """
        self._hear(event)
        context = self._cause_of(event, context)
        with resumed(context), _span_of(event) if commands else nullcontext():
            if isinstance(event, Allocation) and commands:
                self._contexts[event.job] = get_current()
            self._note(commands)
            yield

    def _cause_of(self, event: Event, context: Context) -> Context:
        """Return the trace that led to an event; an empty one where it is the beginning."""
        match event:
            case Said(job, message):
                return self._contexts.get(job, Context()) if isinstance(message, _ABOUT_AN_ALLOCATION) else Context()
            case Exited(job, worker, exit_):
                killed = self._killed.pop((job, worker), None)
                left = self._contexts.get(job) if exit_.kind == "left" else None
                return killed or left or Context()
            case _:
                return context

    def _note(self, commands: Sequence[Command]) -> None:
        """Begin the spans of what takes long, in the present trace."""
        for command in commands:
            match command:
                case Start(job, worker):
                    span = begin("start worker", job=job, worker=worker)
                    self._starting[job, worker] = get_current(), span
                case Kill(job, worker):
                    self._killed[job, worker] = get_current()
                case Send(job, _, Order(generation=generation)):
                    self._ordered(job, generation)
                case _:
                    pass

    def _ordered(self, job: str, generation: int) -> None:
        forming = self._forming.get(job)
        if forming is None or forming.generation < generation:
            self._formed(job)
            self._forming[job] = _Forming(generation, begin("form generation", job=job, generation=generation))

    def _hear(self, event: Event) -> None:
        """End what an event ends."""
        match event:
            case Said(job, message):
                self._heard(job, message)
            case Exited(job, worker):
                self._end_start((job, worker))
            case AllocationGone(job):
                self._contexts.pop(job, None)
                self._forming.pop(job, None)
            case _:
                pass

    def _heard(self, job: str, message: FromWorker) -> None:
        match message:
            case Hello(worker=worker) if started := self._end_start((job, worker)):
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
        """End the span of a worker's way to its training call; return what it was a part of."""
        context, span = self._starting.pop(key, (None, None))
        if span is not None:
            span.end()
        return context

    def _formed(self, job: str) -> None:
        forming = self._forming.get(job)
        if forming and forming.span:
            forming.span.end()
            forming.span = None


def _span_of(event: Event) -> AbstractContextManager[object]:
    """Return a span for what is worth one."""
    match event:
        case Allocation(job=job, generation=generation):
            return traced("carry out allocation", job=job, generation=generation)
        case Exited(job, worker, exit_):
            return traced("worker is gone", job=job, worker=worker, how=exit_.kind)
        case _:
            return nullcontext()
