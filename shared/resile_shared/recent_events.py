"""The last events of a core, printed with every internal error: they show what led to it."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ResileError

MAX_EVENTS = 32
MAX_EVENT_CHARACTERS = 400


class InternalError(ResileError):
    """A core broke one of its own rules. Its text names the core and the rule, and lists the last events."""

    def __init__(self, core: str, fault: str, recent: str) -> None:
        super().__init__(
            f"internal error in the {core}: {fault}. Please report it with these events, oldest first:\n{recent}"
        )
        self.core = core
        self.fault = fault


class RecentEvents:
    """A bounded log of the events that a core has handled."""

    def __init__(self, core: str) -> None:
        self._core = core
        self._events: deque[object] = deque(maxlen=MAX_EVENTS)

    @contextmanager
    def handling(self, event: object) -> Iterator[None]:
        """Record ``event``; raise what is raised while it is handled as an InternalError that lists the last events."""
        self._events.append(event)
        try:
            yield
        except Exception as error:
            raise InternalError(self._core, f"{type(error).__name__}: {error}", str(self)) from error

    def __str__(self) -> str:
        """One event a line, oldest first, each cut to a bounded length."""
        return "\n".join(f"  {_cut(repr(event))}" for event in self._events)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_EVENT_CHARACTERS else f"{text[:MAX_EVENT_CHARACTERS]}..."
