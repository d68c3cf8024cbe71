"""Facts on their way to the bus, in a file that outlives the agent: one a line, and none once all are published.

What is here when an agent starts was said by workers of an earlier one. It may have been published already: a message
keeps its id, so it has its effect once.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from resile_shared.messages.message import Message
from resile_shared.messages.reports import Report

logger = logging.getLogger(__name__)


class Spooled(Message):
    """A fact, and the id under which it is published."""

    id: str
    report: Report


@dataclass
class Spool:
    """The file at ``path``. It survives the end of the agent, and not that of the machine: it is never synced."""

    path: Path
    is_empty: bool = True

    def read(self) -> list[Spooled]:
        """Return what an earlier agent left, in its order; the last line may be cut short."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(Spooled.model_validate_json(line))
            except ValidationError:
                logger.warning("%s: a line of %s bytes cannot be read, and is left out", self.path, len(line))
        self.is_empty = not lines
        return found

    def add(self, spooled: Spooled) -> None:
        """Append a fact. A disk that is full costs only its survival."""
        try:
            with self.path.open("ab") as file:
                file.write(spooled.model_dump_json().encode() + b"\n")
            self.is_empty = False
        except OSError as error:
            logger.warning("%s: a fact is kept in memory alone: %s", self.path, error.strerror)

    def clear(self) -> None:
        """Forget all: it is published."""
        if not self.is_empty:
            self.path.unlink(missing_ok=True)
            self.is_empty = True
