"""The communicator of one generation: a process group, and the thread that forms it and runs all of its operations.

No other thread calls the library, except to abort and to ask for errors, so no other thread ever waits for a peer.
"""

import threading
import time
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue

from .process_group import DeviceGroup

Task = Callable[[DeviceGroup], None]
Form = Callable[[Task], DeviceGroup]
"""Forms a process group, and calls its argument with the group as soon as that can be aborted."""


class Condition(Enum):
    """How far a communicator has come; it never goes back."""

    FORMING = 1
    READY = 2
    ENDED = 3


class Communicator:
    """Forms a group by ``form`` in the background, then runs tasks one after the other. From any thread.

    ``give_up`` makes a ``form`` that waits for other members fail. A communicator that has not formed after
    ``forming_seconds`` ends, even if a call of the library does not return.

    ``on_change`` is called after each change of ``condition``, and after each task, by the communicator's thread.
    """

    def __init__(
        self,
        name: str,
        form: Form,
        on_change: Callable[[], None],
        *,
        forming_seconds: float,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.reason = ""
        """Why the communicator has ended: the first cause."""
        self._form = form
        self._give_up = give_up
        self._on_change = on_change
        self._condition = Condition.FORMING
        self._group: DeviceGroup | None = None
        self._has_aborted = threading.Event()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._abort_lock = threading.Lock()
        self._has_settled = threading.Event()
        reason = f"the devices were not connected within {forming_seconds:g} seconds"
        self._deadline = threading.Timer(forming_seconds, self._give_up_forming, [reason])
        self._deadline.name, self._deadline.daemon = f"resile-{name}-deadline", True
        self._deadline.start()
        self._thread = threading.Thread(target=self._run, name=f"resile-{name}", daemon=True)
        self._thread.start()

    @property
    def condition(self) -> Condition:
        """How far it has come."""
        return self._condition

    def submit(self, task: Task) -> None:
        """Run ``task`` after all earlier ones; no effect if the communicator has ended. An exception ends it."""
        self._tasks.put(task)

    def abandon(self, reason: str) -> None:
        """End it: an operation under way fails soon, later ones are not begun. Returns at once."""
        if self._end(reason):
            self._give_up()
            threading.Thread(target=self._abort, name=f"{self._thread.name}-abort", daemon=True).start()

    def check(self) -> None:
        """End it if the library has reported an error of an operation for which the device still waits."""
        group = self._group
        if group is not None and (error := group.error()):
            self.abandon(error)

    def await_forming(self, seconds: float) -> None:
        """Wait until it has formed or ended."""
        self._has_settled.wait(seconds)

    def await_end(self, seconds: float) -> bool:
        """After `abandon`: wait until its operations are aborted and it queues no others; return whether that is so."""
        deadline = time.monotonic() + seconds
        if not self._has_aborted.wait(seconds):
            return False
        while self._thread.is_alive() and not self._has_released_memory:
            if time.monotonic() > deadline:
                return False
            self._thread.join(0.001)
        return True

    @property
    def _has_released_memory(self) -> bool:
        group = self._group
        return group is not None and group.has_released_memory

    def _give_up_forming(self, reason: str) -> None:
        if not self._has_settled.is_set():
            self.abandon(reason)

    def _settle(self) -> None:
        self._has_settled.set()
        self._deadline.cancel()
        self._on_change()

    def _end(self, reason: str) -> bool:
        with self._lock:
            if self._condition is Condition.ENDED:
                return False
            self._condition, self.reason = Condition.ENDED, reason
        self._tasks.put(None)
        self._settle()
        return True

    def _abort(self) -> None:
        """Abort the group, if there is one. The first thread to call this aborts it; the others wait for that."""
        with self._abort_lock:
            if self._group is not None and not self._has_aborted.is_set():
                self._group.abort()
                self._has_aborted.set()

    def _on_group(self, group: DeviceGroup) -> None:
        self._group = group
        if self._condition is Condition.ENDED:
            raise RuntimeError(self.reason)

    def _run(self) -> None:
        try:
            self._group = self._form(self._on_group)
            with self._lock:
                if self._condition is Condition.FORMING:
                    self._condition = Condition.READY
            self._settle()
            while self._condition is Condition.READY and (task := self._tasks.get()) is not None:
                task(self._group)
                del task  # it holds tensors
                self._on_change()
        except Exception as error:
            self._end(_first_line(error))
        finally:
            try:
                self._abort()  # what is queued on the device may wait for a peer that does not come
            finally:
                self._has_aborted.set()  # or there was no group
                self._group = None


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).partition("\n")[0]
