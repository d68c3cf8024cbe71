"""Records what a worker does around a change of its job, for the trace of the change.

While nothing changes, an iteration costs two clock readings and an entry in a short ring buffer. From a change on, the
worker records what it does until it has trained `NUM_AROUND` iterations; the agent turns the records into spans.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from .messages import MAX_WORKER_SPANS, WorkerSpan

NUM_AROUND = 3
"""Iterations before and after a change that are part of its trace."""
SAMPLE_SECONDS = 30.0
"""While nothing changes, an iteration is reported as a sample at most once in this time."""
Value = str | int | float | bool
_Send = Callable[[tuple[WorkerSpan, ...], bool], None]
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Open:
    def __init__(self, name: str, begin: float, parent: int | None, attributes: dict[str, Value]) -> None:
        self.name = name
        self.begin = begin
        self.end: float | None = None
        self.parent = parent
        self.attributes = attributes


class ChangeRecorder:
    """The steps of the current change, and the newest iterations. For the main thread alone.

    A worker begins in a change: it joins, or starts the run.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.is_recording = True
        """Whether a change is in progress."""
        self._clock = clock or time.time
        self._iterations: deque[tuple[int, float, float]] = deque(maxlen=NUM_AROUND)
        self._iteration: int | None = None
        """The iteration in progress."""
        self._begun = self._clock()
        self._sampled = self._begun
        self._steps: list[_Open] = []
        self._current: int | None = None
        self._num_left = NUM_AROUND

    def begin(self) -> None:
        """A change begins: the newest iterations belong to it."""
        self._close()
        for number, begun, ended in self._iterations:
            self._add("iteration", begun, {"iteration": number}).end = ended
        if self._iteration is not None and not self.is_recording:
            abandoned: dict[str, Value] = {"iteration": self._iteration, "abandoned": True}
            self._add("iteration", self._begun, abandoned).end = self._clock()
        self._iterations.clear()
        self._iteration = None
        self.is_recording, self._num_left = True, NUM_AROUND

    def now(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self._clock()

    def step(self, name: str, **attributes: Value) -> AbstractContextManager[None]:
        """Record the block as a step of the change, within the step in progress; outside of a change do nothing."""
        return self._step(name, attributes) if self.is_recording else _NOTHING

    @contextmanager
    def _step(self, name: str, attributes: dict[str, Value]) -> Iterator[None]:
        before = self._current
        step = self._add(name, self._clock(), attributes)
        self._current = len(self._steps) - 1 if self._steps and self._steps[-1] is step else before
        try:
            yield
        except Exception as error:
            step.attributes["error.type"] = type(error).__name__
            raise
        finally:
            step.end = self._clock()
            self._current = before

    def on_begin(self, iteration: int) -> None:
        """An iteration begins."""
        self._begun, self._iteration = self._clock(), iteration
        if self.is_recording:
            self._add("iteration", self._begun, {"iteration": iteration})
            self._current = len(self._steps) - 1

    def on_commit(self, iteration: int, send: _Send) -> None:
        """The iteration was committed. Passes what to report to ``send``, and whether it is only a sample."""
        now, self._iteration = self._clock(), None
        if self.is_recording:
            self._close(now)
            self._num_left -= 1
            self.is_recording = self._num_left > 0
            if self._num_left == NUM_AROUND - 1 or not self.is_recording:
                self.flush(lambda spans: send(spans, False))
            return
        self._iterations.append((iteration, self._begun, now))
        if now - self._sampled >= SAMPLE_SECONDS:
            self._sampled = now
            send((span_of("iteration", self._begun, now, iteration=iteration),), True)

    def flush(self, send: Callable[[tuple[WorkerSpan, ...]], None]) -> None:
        """Pass the recorded steps, if any, to ``send``; those in progress are reported as ending now."""
        now = self._clock()
        steps, self._steps, self._current = self._steps, [], None
        if steps:
            send(tuple(_span(step, now) for step in steps))

    def _close(self, now: float | None = None) -> None:
        """End the steps in progress: an iteration, which was abandoned unless it was committed ``now``."""
        for step in self._steps:
            if step.end is None:
                step.end = self._clock() if now is None else now
                if now is None:
                    step.attributes["abandoned"] = True
        self._current = None

    def _add(self, name: str, begin: float, attributes: dict[str, Value]) -> _Open:
        step = _Open(name, begin, self._current, attributes)
        if len(self._steps) < MAX_WORKER_SPANS:
            self._steps.append(step)
        return step


def span_of(name: str, begin: float, end: float, *, parent: int | None = None, **attributes: Value) -> WorkerSpan:
    """Return a span of times in seconds since the epoch."""
    first = round(begin * 1e6)
    return WorkerSpan(name=name, begin=first, end=max(first, round(end * 1e6)), parent=parent, attributes=attributes)


def _span(step: _Open, now: float) -> WorkerSpan:
    end = now if step.end is None else step.end
    return span_of(step.name, step.begin, end, parent=step.parent, **step.attributes)
