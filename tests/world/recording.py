"""Records what a core is told and answers, and replays it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recording:
    """The life of one core: how it was made, and each event with its time and the commands that followed."""

    core: type[Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    steps: list[tuple[Any, float, list[Any]]] = field(default_factory=list)

    def replay(self) -> None:
        """Give a new core the same events; it has to answer with the same commands."""
        arguments, keywords = self.arguments
        core = self.core(*arguments, **keywords)
        for number, (event, now, commands) in enumerate(self.steps):
            assert core.handle(event, now=now) == commands, f"step {number} of {self.core.__name__}: {event}"


def record(core: type[Any], found: list[Recording], replace: Callable[[type[Any], str, Any], None] = setattr) -> None:
    """Add a recording of each ``core`` that is made from now on to ``found``."""
    make, handle = core.__init__, core.handle
    of: dict[int, Recording] = {}

    def recorded_init(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        of[id(self)] = Recording(core, (arguments, keywords))
        found.append(of[id(self)])

    def recorded_handle(self: Any, event: Any, *, now: float) -> list[Any]:
        commands: list[Any] = handle(self, event, now=now)
        of[id(self)].steps.append((event, now, list(commands)))
        return commands

    replace(core, "__init__", recorded_init)
    replace(core, "handle", recorded_handle)
