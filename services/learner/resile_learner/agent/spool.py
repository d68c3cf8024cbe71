"""Keeps reports that are not published yet in a file that survives the agent: one a line, and none once all are out.

What is here when an agent starts was reported by workers of an earlier one. It may have been published already: a
message keeps its id, so that it takes effect once.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from resile_shared.messages.message import Message
from resile_shared.messages.reports import Report

logger = logging.getLogger(__name__)


class Spooled(Message):
    """A report, and the id under which it is published."""

    id: str
    report: Report


@dataclass
class Spool:
    """The file at ``path``. It survives the end of the agent, but not of the machine: it is never synced."""

    path: Path
    is_empty: bool = True

    def read(self) -> list[Spooled]:
        """Return what an earlier agent left, in order; the last line may be incomplete."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(Spooled.model_validate_json(line))
            except ValidationError:
                logger.warning("%s: skipped a line of %s bytes that cannot be read", self.path, len(line))
        self.is_empty = not lines
        return found

    def add(self, spooled: Spooled) -> None:
        """Append a report. If the disk is full, the report just does not survive the agent."""
        try:
            with self.path.open("ab") as file:
                file.write(spooled.model_dump_json().encode() + b"\n")
            self.is_empty = False
        except OSError as error:
            logger.warning("%s: a report is kept in memory only: %s", self.path, error.strerror)

    def clear(self) -> None:
        """Remove all reports: they are published."""
        if not self.is_empty:
            self.path.unlink(missing_ok=True)
            self.is_empty = True
