"""An event loop in virtual time, and processes on it that can crash and freeze between any two steps.

Nothing runs in parallel and nothing waits: when no callback is ready, time jumps to the next timer. A callback belongs
to the process in whose context it was scheduled. A crashed process never runs again, not even its ``finally`` blocks;
a frozen one runs what it missed when it is thawed.
"""

import asyncio
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

START = 1_790_000_000.0
"""Wall clock time, in seconds since the epoch, at which every world begins."""


class Stuck(Exception):
    """Nothing is ready and no timer is set: the world would wait for ever."""


class SimHandle(events.TimerHandle):
    """A callback that is ready, or will be: what asyncio's own has, without what only its debug mode needs."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[object, ...], loop: "SimLoop", context: Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()


def _nothing() -> None:
    pass


class SimLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order in which they became ready. ``time()`` is virtual, in seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_steps = 0
        self.errors: list[str] = []
        """What callbacks and tasks raised and nobody handled."""
        self._ready: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._numbers = itertools.count()
        self._is_running = False

    def time(self) -> float:
        return self.now

    def run_until(self, done: Callable[[], bool], *, limit: float) -> bool:
        """Run until ``done()`` or virtual time ``limit``; return whether it is done."""
        events._set_running_loop(self)
        self._is_running = True
        try:
            while not done():
                if self._ready:
                    self._step(self._ready.popleft())
                elif not self._timers:
                    raise Stuck
                elif self._timers[0][0] > limit:
                    self.now = limit
                    return False
                else:
                    when, _, handle = heapq.heappop(self._timers)
                    self.now = max(self.now, when)
                    self._step(handle)
            return True
        finally:
            self._is_running = False
            events._set_running_loop(None)

    def _step(self, handle: "SimHandle") -> None:
        """Run a callback, as ``handle._run()`` does: what that does beside it takes longer than many callbacks."""
        if handle._cancelled:
            return
        context = handle._context
        process = context.get(_process)
        if process is not None and process.is_disturbed and not process.admit(handle):
            return
        self.num_steps += 1
        try:
            context.run(handle._callback, *handle._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"Exception in callback {handle._callback}", "exception": error})

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> events.Handle:
        handle = SimHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> events.TimerHandle:
        return self.call_at(self.now + max(0.0, delay), callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> events.TimerHandle:
        handle = SimHandle(callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def admit_again(self, handles: "deque[SimHandle]") -> None:
        self._ready.extend(handles)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Call ``func`` at once: what would be done in a thread takes no time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def sock_accept(self, sock: Any) -> Any:
        return await sock.accept()

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await sock.connect(address)

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        data: bytes = await sock.recv(nbytes)
        return data

    async def sock_sendall(self, sock: Any, data: bytes) -> None:
        await sock.sendall(data)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *_: object, sock: Any
    ) -> Any:
        protocol = protocol_factory()
        return sock.open_stream(protocol), protocol

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        process = _process.get()
        if process is None or not process.is_dead:
            self.errors.append(f"{context.get('message')}: {error!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False


class Process:
    """A process of the world: its tasks, its host, and the wall clock there."""

    def __init__(self, loop: SimLoop, name: str, *, host: str = "", clock: "Clock | None" = None) -> None:
        self.loop = loop
        self.name = name
        self.host = host or name
        self.clock = clock or Clock()
        self.is_dead = False
        self.is_disturbed = False
        """Whether it is dead or frozen, or will crash: only then are its steps looked at."""
        self.on_death: list[Callable[[], object]] = []
        """Called when it crashes or ends."""
        self._parked: deque[SimHandle] | None = None
        self._crash_after = -1

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run ``work`` as a task of this process."""
        return self.loop.create_task(work, context=self.context())

    def context(self) -> Context:
        """A context in which callbacks belong to this process."""
        context = copy_context()
        context.run(_process.set, self)
        return context

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` in this process."""
        return self.context().run(function, *args)

    def admit(self, handle: SimHandle) -> bool:
        """Whether ``handle`` runs now."""
        if self.is_dead:
            return False
        if self._parked is not None:
            self._parked.append(handle)
            return False
        return not self.is_crashing()

    def is_crashing(self) -> bool:
        """Count a step; return whether the process crashes before it."""
        if self._crash_after >= 0:
            self._crash_after -= 1
            if self._crash_after < 0:
                self.crash()
        return self.is_dead

    def crash(self) -> None:
        """End it at once: it never runs again."""
        if not self.is_dead:
            self.is_dead = self.is_disturbed = True
            self._parked = None
            for call in self.on_death:
                call()

    def crash_after(self, num_steps: int) -> None:
        """Crash it before one of its next steps."""
        self._crash_after = num_steps
        self.is_disturbed = True

    @property
    def is_frozen(self) -> bool:
        return self._parked is not None

    def freeze(self) -> None:
        if not self.is_dead and self._parked is None:
            self._parked = deque()
            self.is_disturbed = True

    def thaw(self) -> None:
        if self._parked is not None:
            parked, self._parked = self._parked, None
            self.is_disturbed = self._crash_after >= 0
            self.loop.admit_again(parked)


class Clock:
    """The wall clock of one host: ``offset`` seconds ahead of the world's."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset


_process: ContextVar[Process | None] = ContextVar("process", default=None)


def current_process() -> Process | None:
    """The process that runs now."""
    return _process.get()


class SimTime:
    """Takes the place of the module ``time`` in the modules of the product."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        process = current_process()
        return START + self._loop.now + (process.clock.offset if process else 0.0)

    def monotonic(self) -> float:
        return self._loop.now

    perf_counter = monotonic
