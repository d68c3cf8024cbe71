"""Assigns what happens on this host to traces.

An allocation is carried out in the trace in which it was written, and what the job's workers do about it belongs to the
same trace: they start, reach their training call, form the generation, hand their state over, train its first
iterations, leave. What the agent publishes about that carries the trace on. A checkpoint belongs to the trace of the
pause that asked for it, if one did, and a failure to one of its own (`failure_traces.py`). Everything else that a
worker does begins a trace of its own.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, Span

from resile_shared.messages.allocations import Allocation
from resile_shared.telemetry.span_queue import ITERATION
from resile_shared.telemetry.traces import (
    Value,
    attributes_of,
    before,
    began,
    begin,
    end,
    fail,
    in_span,
    link_to,
    resumed,
    trace_id,
    traced,
)

from ..messages import (
    ChangeTraced,
    CheckpointSaved,
    Failed,
    FromWorker,
    Joined,
    Left,
    Order,
    Pause,
    PeerSuspected,
    Ready,
    Switched,
    WorkerListening,
)
from ..processes.runner import Key
from .events import (
    AllocationGone,
    Command,
    Event,
    ForkWorker,
    KillWorker,
    MessageReceived,
    SendToWorker,
    StartWorker,
    TemplateEnded,
    UnwatchAllocation,
    WorkerExited,
)
from .failure_traces import FailureTraces

MAX_STEPS = 8
_ABOUT_AN_ALLOCATION = (WorkerListening, Ready, Joined, Switched, Left)


@dataclass
class _Forming:
    generation: int
    span: Span
    is_open: bool = True


class HostTraces:
    """Keeps the trace of each job's newest allocation, and the spans of what takes longer than one event."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._contexts: dict[str, Context] = {}
        self._steps: defaultdict[str, deque[Context]] = defaultdict(lambda: deque(maxlen=MAX_STEPS))
        """For each job, the newest allocations and orders, which its workers' spans hang under."""
        self._starting: dict[Key, tuple[Context, Span]] = {}
        self._templates: dict[Key, int] = {}
        """The template of each worker that is being started."""
        self._forming: dict[str, _Forming] = {}
        self._killed: dict[Key, Context] = {}
        self._pauses: dict[str, Context] = {}
        self._checkpoints: dict[str, Context] = {}
        self._failures = FailureTraces()

    @contextmanager
    def following(self, event: Event, commands: Sequence[Command], context: Context) -> Iterator[None]:
        """Run the block, which carries out ``commands``, in the trace of ``event``.

        ``context`` is the trace in which the event was received.
        """
        self._end_spans(event)
        if isinstance(event, Allocation) and commands and trace_id(context):
            self._failures.on_allocated(event.job, event.generation, trace_id(context))
        failed = self._failed_generation(event)
        context = self._failures.of(*failed) if failed else self._cause_of(event, context)
        with resumed(context), self._span_of(event) if commands else nullcontext() as span:
            if failed and span is not None:
                self._failures.add(*failed, span)
                _mark_failure(event, span)
            if isinstance(event, Allocation) and commands:
                self._contexts[event.job] = get_current()
                self._steps[event.job].append(get_current())
            self._begin_spans(commands)
            yield

    def close(self) -> None:
        """End all spans: the agent ends, and what belongs to them is exported or not known."""
        for _, span in self._starting.values():
            end(span)
        for job in list(self._forming):
            self._formed(job)

    def _failed_generation(self, event: Event) -> tuple[str, int] | None:
        """Return the job and the generation whose failure an event is about; None if it is about none."""
        match event:
            case MessageReceived(job, PeerSuspected(generation=generation)):
                return job, generation
            case MessageReceived(job, Failed()):
                return job, self._failures.generation(job)
            case WorkerExited(job, worker, exit_) if (job, worker) not in self._killed:
                return None if exit_.kind in ("finished", "left") else (job, self._failures.generation(job))
            case _:
                return None

    def _cause_of(self, event: Event, context: Context) -> Context:
        """Return the trace that led to an event; an empty one if the event begins a trace."""
        match event:
            case MessageReceived(job, message):
                return self._cause_of_message(job, message)
            case WorkerExited(job, worker, exit_):
                killed = self._killed.pop((job, worker), None)
                left = self._contexts.get(job) if exit_.kind == "left" else None
                return killed or left or Context()
            case _:
                return context

    def _cause_of_message(self, job: str, message: FromWorker) -> Context:
        match message:
            case CheckpointSaved():
                return self._checkpoints.get(job, Context())
            case _ if isinstance(message, _ABOUT_AN_ALLOCATION):
                return self._contexts.get(job, Context())
            case _:
                return Context()

    def _span_of(self, event: Event) -> AbstractContextManager[Span | None]:
        """Return the span of an event, if it has one."""
        match event:
            case Allocation(job=job, generation=generation):
                return traced("carry out allocation", job=job, generation=generation, host=self._host)
            case WorkerExited(job, worker, exit_):
                return traced("worker is gone", job=job, worker=worker, host=self._host, how=exit_.kind)
            case MessageReceived(job, Failed(worker=worker)):
                return traced("worker failed", job=job, worker=worker, host=self._host)
            case MessageReceived(job, PeerSuspected() as suspicion) if not trace_id():
                return self._suspected(job, suspicion)
            case _:
                return nullcontext()

    def _suspected(self, job: str, suspicion: PeerSuspected) -> AbstractContextManager[Span]:
        """Return the span of the first suspicion in a generation; workers repeat them."""
        return traced(
            "worker suspected",
            job=job,
            host=self._host,
            worker=suspicion.worker,
            generation=suspicion.generation,
            suspect=suspicion.suspect,
            evidence=suspicion.evidence,
            reason=suspicion.reason,
        )

    def _begin_spans(self, commands: Sequence[Command]) -> None:
        """Begin the spans of what takes longer than one event, in the current trace; forget jobs that leave."""
        for command in commands:
            match command:
                case StartWorker(job, worker):
                    span = begin("start worker", job=job, worker=worker, host=self._host)
                    self._starting[job, worker] = get_current(), span
                case ForkWorker():
                    self._forked(command)
                case KillWorker(job, worker):
                    self._killed[job, worker] = get_current()
                case SendToWorker(job, _, Order(generation=generation)):
                    self._ordered(job, generation)
                case SendToWorker(job, _, Pause()) if trace_id():
                    self._pauses[job] = get_current()
                case UnwatchAllocation(job):
                    self._forget(job)
                case _:
                    pass

    def _forked(self, fork: ForkWorker) -> None:
        """Record in the span of a worker's start which template it is forked from, or why it is forked from none."""
        started = self._starting.get((fork.job, fork.worker))
        if started is None:
            return
        if fork.template is None:
            started[1].set_attributes(attributes_of({"template": "none", "reason": fork.reason}))
        else:
            self._templates[fork.job, fork.worker] = fork.template
            started[1].set_attributes(attributes_of({"template": fork.template}))

    def _template_ended(self, number: int, reason: str) -> None:
        """Record the end of a template in the spans of the workers that should have been forked from it."""
        for key, template in self._templates.items():
            if template == number and key in self._starting:
                self._starting[key][1].set_attributes(attributes_of({"template": "none", "reason": reason}))

    def _ordered(self, job: str, generation: int) -> None:
        forming = self._forming.get(job)
        if forming is None or forming.generation < generation:
            self._formed(job)
            span = begin("form generation", job=job, generation=generation, host=self._host)
            self._forming[job] = _Forming(generation, span)
            self._steps[job].append(in_span(span))

    def _end_spans(self, event: Event) -> None:
        """End the spans that ``event`` completes."""
        match event:
            case MessageReceived(job, message):
                self._on_message(job, message)
            case WorkerExited(job, worker):
                self._end_start((job, worker))
            case AllocationGone(job):
                self._forget(job)
            case TemplateEnded(number, reason):
                self._template_ended(number, reason)
            case _:
                pass

    def _on_message(self, job: str, message: FromWorker) -> None:
        match message:
            case WorkerListening(worker=worker) if started := self._end_start((job, worker)):
                span = begin("run script to training call", started, job=job, worker=worker, host=self._host)
                self._starting[job, worker] = started, span
            case Ready(worker=worker):
                self._end_start((job, worker))
            case Joined(generation=generation) | Switched(generation=generation):
                self._failures.on_trained(job, generation)
                forming = self._forming.get(job)
                if forming and generation >= forming.generation:
                    self._formed(job)
            case Left():
                self._formed(job)
            case ChangeTraced():
                self._on_traced(job, message)
            case _:
                pass

    def _on_traced(self, job: str, traced_change: ChangeTraced) -> None:
        """Make spans of what a worker did around a change."""
        forming = self._forming.get(job)
        change = in_span(forming.span) if forming else self._contexts.get(job, Context())
        match traced_change.change:
            case "generation":
                self._add(job, traced_change, change)
            case "checkpoint":
                pause = self._pauses.pop(job, Context()) if traced_change.pausing else Context()
                self._checkpoints[job] = self._add(job, traced_change, pause)
            case "none":
                links = (link_to(change),) if trace_id(change) else ()
                for span in traced_change.spans:
                    sampled = begin(ITERATION, Context(), span.attributes, begun=span.begin / 1e6, links=links)
                    end(sampled, ended=span.end / 1e6)

    def _add(self, job: str, traced_change: ChangeTraced, context: Context) -> Context:
        """Add the spans of a worker to the trace of ``context``; return the context of the first of them.

        An iteration that began before the change is linked instead, with what belongs to it.
        """
        made: list[tuple[Context, dict[str, Value]]] = []
        own: dict[str, Value] = {"job": job, "worker": traced_change.worker, "host": self._host}
        for span in traced_change.spans:
            begun, links = span.begin / 1e6, tuple[Link, ...]()
            if span.parent is not None and span.parent < len(made):
                parent, linked = made[span.parent]
            else:
                parent, linked = self._parent(job, begun, context), {}
                if span.name == "iteration" and begun < began(parent):
                    links, linked = before(parent)
                    parent = Context()
            found = begin(span.name, parent, {**span.attributes, **own, **linked}, begun=begun, links=links)
            end(found, ended=span.end / 1e6)
            made.append((in_span(found), linked))
        return made[0][0] if made else context

    def _parent(self, job: str, begun: float, context: Context) -> Context:
        """Return what a worker's span hangs under: the newest order or allocation in the trace that is not later."""
        steps = [
            step for step in self._steps.get(job, ()) if trace_id(step) == trace_id(context) and began(step) <= begun
        ]
        return steps[-1] if steps else context

    def _end_start(self, key: Key) -> Context | None:
        """End the span of a worker's start; return the trace that it belongs to."""
        context, span = self._starting.pop(key, (None, None))
        self._templates.pop(key, None)
        if span is not None:
            end(span)
        return context

    def _forget(self, job: str) -> None:
        self._formed(job)
        for kept in (self._contexts, self._steps, self._forming, self._pauses, self._checkpoints):
            kept.pop(job, None)

    def _formed(self, job: str) -> None:
        forming = self._forming.get(job)
        if forming and forming.is_open:
            end(forming.span)
            forming.is_open = False


def _mark_failure(event: Event, span: Span) -> None:
    """Give the span of a failure the status of an error; a suspicion may be wrong, so the scheduler says what is."""
    match event:
        case WorkerExited(_, worker, exit_):
            fail(span, exit_.kind, exit_.describe(f"worker {worker}"))
        case MessageReceived(_, Failed(worker=worker, message=message)):
            fail(span, "failed", f"worker {worker}: {message}")
        case _:
            pass
