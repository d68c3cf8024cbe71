"""`.resileignore`: which files of a folder are not sent with a job.

One pattern a line, as in a .gitignore: a name (``*.csv``) is ignored wherever it is, a path (``data/raw``, ``/notes``)
counts from the folder of the file, and with ``/`` at its end a pattern means folders alone. Empty lines and lines that
begin with ``#`` say nothing. Patterns that take something in again (``!``) and ``**`` are refused.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from resile_shared.errors import UsageError

FILE = ".resileignore"


@dataclass(frozen=True)
class _Pattern:
    parts: tuple[str, ...]
    is_anchored: bool
    is_folder: bool

    def matches(self, parts: tuple[str, ...], *, is_folder: bool) -> bool:
        if self.is_folder and not is_folder:
            return False
        if not self.is_anchored:
            return fnmatchcase(parts[-1], self.parts[0])
        return len(parts) == len(self.parts) and all(map(fnmatchcase, parts, self.parts))


class IgnoredFiles:
    """What the `.resileignore` of ``folder`` says, if there is one. Raises UsageError if it is not readable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / FILE
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        stripped = [(number, line.strip()) for number, line in enumerate(lines, 1)]
        self._patterns = [_parse(file, number, line) for number, line in stripped if line and line[0] != "#"]

    def has(self, path: Path, *, is_folder: bool) -> bool:
        """Whether ``path``, in a folder that is not ignored, is ignored."""
        parts = path.relative_to(self._folder).parts
        return any(pattern.matches(parts, is_folder=is_folder) for pattern in self._patterns)


def _parse(file: Path, number: int, line: str) -> _Pattern:
    parts = tuple(part for part in line.split("/") if part)
    if line.startswith("!") or "**" in line or not parts:
        raise UsageError(
            f"{file}, line {number}: {line!r} is not understood: name what is not sent, as in *.csv, data/raw or notes/"
        )
    return _Pattern(parts, "/" in line.rstrip("/"), line.endswith("/"))
