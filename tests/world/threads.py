"""Threads of simulated processes, so that code which blocks runs unchanged on the event loop of a world.

A thread is a greenlet. It runs until it blocks (a condition, a sleep, a wait for links); then the loop goes on, and
continues it by a callback, so that it crashes and freezes with its process as all else does. `SimThreading` takes the
place of the module ``threading`` in the modules of the product, `BlockingTime` that of ``time``.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, ContextVar
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from .loop import Process, SimLoop, SimTime, current_process

PREEMPTION = 0.02
"""How often a thread is interrupted before it takes a lock."""


class ProcessEnded(BaseException):
    """The process that runs has ended: nothing of it runs any more."""


def crash_point() -> None:
    """Count a step of the thread that runs: its process may crash before it."""
    thread = _thread.get()
    if thread is not None and thread.process.is_disturbed and thread.is_running() and thread.process.is_crashing():
        thread.end()


class SimThread:
    """A thread of the current process."""

    def __init__(
        self,
        threads: "SimThreading",
        target: Callable[..., object],
        *,
        args: Iterable[Any] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        process = current_process()
        assert process is not None
        self.name = name
        self.process: Process = process
        self.ident = 0
        self._threads = threads
        self._loop = threads.loop
        self._target = target
        self._args = args
        self._context = process.context()
        self._context.run(_thread.set, self)
        self._ticket = 0
        self._woken = -1
        self._is_done = False
        self._joining: list[SimThread] = []
        self._greenlet: greenlet = greenlet(self._run)
        self._greenlet.gr_context = self._context.copy()

    def start(self) -> None:
        self.process.on_death.append(self._on_death)
        self.wake()

    def is_alive(self) -> bool:
        return not self._is_done

    def join(self, timeout: float | None = None) -> None:
        if not self._is_done:
            me = self._threads.running()
            self._joining.append(me)
            me.park(timeout)

    def park(self, timeout: float | None = None) -> None:
        """Let others run until `wake`, for ``timeout`` seconds at the most. Only this thread itself calls it."""
        if self.process.is_dead:
            raise GreenletExit
        timer = None
        if timeout is not None:
            timer = self._loop.call_later(timeout, self._resume, self._ticket, context=self._context)
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()
        if timer is not None:
            timer.cancel()
        if self.process.is_dead:
            raise GreenletExit

    def wake(self) -> None:
        """Let it go on."""
        if self._woken != self._ticket:
            self._woken = self._ticket
            self._loop.call_soon(self._resume, self._ticket, context=self._context)

    def _resume(self, ticket: int) -> None:
        if ticket == self._ticket and not self._greenlet.dead:
            self._ticket += 1
            self._greenlet.parent = getcurrent()
            self._greenlet.switch()

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._is_done = True
            for thread in self._joining:
                thread.wake()

    def _on_death(self) -> None:
        self._loop.call_soon(self._reap, context=Context())

    def _reap(self) -> None:
        """Release what it holds: it was cut off in the middle, and nothing that it does now is seen by anyone."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(GreenletExit)

    def is_running(self) -> bool:
        return getcurrent() is self._greenlet

    def end(self) -> None:
        """Never go on, since its process has ended. Only this thread itself calls it."""
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()
        raise GreenletExit


class SimThreading:
    """In place of the module ``threading``."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng

    def Thread(self, target: Callable[..., object], **settings: Any) -> SimThread:  # noqa: N802
        return SimThread(self, target, **settings)

    def Condition(self) -> "Condition":  # noqa: N802
        return Condition(self)

    def Lock(self) -> "Lock":  # noqa: N802
        return Lock(self)

    RLock = Lock

    def Event(self) -> "Event":  # noqa: N802
        return Event(self)

    def current_thread(self) -> SimThread | None:
        return _thread.get()

    def main_thread(self) -> SimThread | None:
        return _thread.get()

    def running(self) -> SimThread:
        thread = _thread.get()
        assert thread is not None
        assert thread.is_running(), "only a thread can block"
        return thread

    def sleep(self, seconds: float) -> None:
        """Block the current thread for ``seconds``; what an event loop has done in a thread takes no time."""
        me = _thread.get()
        if me is None or not me.is_running():
            return
        deadline = self.loop.now + seconds
        while self.loop.now < deadline or seconds <= 0:
            me.park(max(0.0, deadline - self.loop.now))
            if seconds <= 0:
                return

    def run(self, function: Callable[..., object], *args: object, name: str) -> SimThread:
        """Start a thread of the current process."""
        thread = SimThread(self, function, args=args, name=name)
        thread.start()
        return thread


class Lock:
    """Never contended, since nothing blocks with a lock held; but others may run before it is taken."""

    def __init__(self, threads: SimThreading) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        crash_point()
        thread = _thread.get()
        if thread is not None and thread.is_running() and self._threads.rng.random() < PREEMPTION:
            thread.park(0.0)

    def __exit__(self, *_: object) -> None:
        pass


class Condition(Lock):
    """A condition with its lock."""

    def __init__(self, threads: SimThreading) -> None:
        super().__init__(threads)
        self._waiting: deque[SimThread] = deque()

    def wait(self, timeout: float | None = None) -> None:
        me = self._threads.running()
        self._waiting.append(me)
        me.park(timeout)
        if me in self._waiting:
            self._waiting.remove(me)

    def notify_all(self) -> None:
        while self._waiting:
            self._waiting.popleft().wake()

    def notify(self) -> None:
        if self._waiting:
            self._waiting.popleft().wake()


class Event:
    """A flag that threads wait for."""

    def __init__(self, threads: SimThreading) -> None:
        self._condition = Condition(threads)
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._condition.wait(timeout)
        return self._is_set


class BlockingTime(SimTime):
    """In place of the module ``time`` in code that blocks."""

    def __init__(self, threads: SimThreading) -> None:
        super().__init__(threads.loop)
        self.sleep = threads.sleep

    def process_time(self) -> float:
        return self.monotonic()


class ThreadLoop:
    """The event loop that one thread runs: the world's, with callbacks in the context of that thread."""

    def __init__(self, threads: SimThreading) -> None:
        self._threads = threads
        self._loop = threads.loop
        self._context: Context | None = None
        self._early: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._is_closed = False
        self.call_later = self._loop.call_later
        self.time = self._loop.time

    def create_task(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        return self._loop.create_task(work)

    def call_soon_threadsafe(self, function: Callable[..., object], *args: object) -> None:
        if self._is_closed:
            raise RuntimeError("the loop is closed")
        if self._context is None:
            self._early.append((function, args))
        else:
            self._loop.call_soon(function, *args, context=self._context)

    def run_until_complete(self, work: Coroutine[Any, Any, Any]) -> Any:
        me = self._threads.running()
        self._context = me._context
        task = self._loop.create_task(work, context=self._context)
        task.add_done_callback(lambda _: me.wake(), context=self._context)
        for function, args in self._early:
            self.call_soon_threadsafe(function, *args)
        while not task.done():
            me.park()
        return task.result()

    def close(self) -> None:
        self._is_closed = True


_thread: ContextVar[SimThread | None] = ContextVar("thread", default=None)
