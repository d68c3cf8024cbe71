"""Ends calls that last too long."""

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls ``on_timeout`` on a thread of its own, once a call lasts longer than ``seconds``."""

    def __init__(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        self.seconds = seconds
        self._on_timeout = on_timeout
        self._deadline: float | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="resile-watchdog", daemon=True).start()

    def begin(self, deadline: float | None = None) -> None:
        """A call begins. It may last until ``deadline``, on the monotonic clock, if that is given."""
        self._deadline = time.monotonic() + self.seconds if deadline is None else deadline

    def end(self) -> None:
        """The call has ended."""
        self._deadline = None

    def close(self) -> None:
        """Stop watching."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(min(1.0, self.seconds / 10)):
            deadline = self._deadline
            if deadline is not None and time.monotonic() >= deadline:
                self._on_timeout()
                return
