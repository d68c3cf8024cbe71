"""The communicator of one generation: a process group, and the thread that forms it and runs all of its operations.

No other thread calls the library, except to abort: whoever gives up on a communicator never waits for a peer.
"""

import threading
import time
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue

from .process_group import DeviceGroup

Task = Callable[[DeviceGroup], None]


class Condition(Enum):
    """How far a communicator has come; it never goes back."""

    FORMING = 1
    READY = 2
    ENDED = 3


class Communicator:
    """Forms a group by ``form`` in the background, then runs tasks one after the other. From any thread.

    ``give_up`` makes a ``form`` that waits for other members fail.

    ``on_change`` is called after each change of ``condition``, and after each task, by the communicator's thread.
    """

    def __init__(
        self,
        name: str,
        form: Callable[[], DeviceGroup],
        on_change: Callable[[], None],
        *,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.reason = ""
        """Why it has ended: the first cause."""
        self._form = form
        self._give_up = give_up
        self._on_change = on_change
        self._condition = Condition.FORMING
        self._group: DeviceGroup | None = None
        self._has_aborted = False
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._has_settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"resile-{name}", daemon=True)
        self._thread.start()

    @property
    def condition(self) -> Condition:
        """How far it has come."""
        return self._condition

    def submit(self, task: Task) -> None:
        """Run ``task`` after all earlier ones; nothing if the communicator has ended. What it raises ends it."""
        self._tasks.put(task)

    def abandon(self, reason: str) -> None:
        """End it: an operation under way fails soon, later ones are not begun. Returns at once."""
        if self._end(reason):
            self._give_up()
            threading.Thread(target=self._abort, name=f"{self._thread.name}-abort", daemon=True).start()

    def await_forming(self, seconds: float) -> None:
        """Wait until it has formed or ended."""
        self._has_settled.wait(seconds)

    def await_end(self, seconds: float) -> bool:
        """After `abandon`: wait until it uses no memory of a task any more; return whether that is so."""
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and not self._has_released_memory:
            if time.monotonic() > deadline:
                return False
            self._thread.join(0.001)
        return True

    @property
    def _has_released_memory(self) -> bool:
        group = self._group
        return self._has_aborted and group is not None and group.has_released_memory

    def _end(self, reason: str) -> bool:
        with self._lock:
            if self._condition is Condition.ENDED:
                return False
            self._condition, self.reason = Condition.ENDED, reason
        self._has_settled.set()
        self._tasks.put(None)
        self._on_change()
        return True

    def _abort(self) -> None:
        if group := self._group:
            group.abort()
            self._has_aborted = True

    def _run(self) -> None:
        try:
            self._group = self._form()
            with self._lock:
                if self._condition is Condition.FORMING:
                    self._condition = Condition.READY
            self._has_settled.set()
            self._on_change()
            while self._condition is Condition.READY and (task := self._tasks.get()) is not None:
                task(self._group)
                del task  # it holds tensors
                self._on_change()
        except Exception as error:
            if self._end(_first_line(error)):
                self._abort()
        finally:
            self._group = None


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).partition("\n")[0]
