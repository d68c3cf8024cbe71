"""Files that `.resileignore` and `.gitignore` name, as Git reads these: the patterns by pathspec, the rest here."""

import codecs
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from resile_shared.errors import UsageError

RESILEIGNORE = ".resileignore"
_TRAILING_SPACES = re.compile(r"(?<!\\) +$")


class _Pattern:
    """A line of a .gitignore. It matches a path itself: what is below an ignored folder is never asked about."""

    def __init__(self, line: bytes) -> None:
        """Raise ValueError for a line that is no pattern."""
        text = _TRAILING_SPACES.sub("", line.decode("latin-1"))  # Git compares bytes: é is two for `?`
        self._is_for_folders = text.endswith("/")
        self._pattern = GitIgnoreSpecPattern(text.removesuffix("/"))

    def includes(self, path: Path, *, is_folder: bool) -> bool | None:
        """Whether a path that matches is ignored (False) or asked for (True); None for one that does not match."""
        if self._pattern.include is None or (self._is_for_folders and not is_folder):
            return None
        found = self._pattern.match_file(os.fsencode(path).decode("latin-1"))
        is_below = found is not None and any(found.match.groupdict().values())  # a folder above is what matches
        return None if found is None or is_below else not self._pattern.include


class IgnoredFiles:
    """What the patterns of a file say of the files below ``folder``; those of a .gitignore have this form."""

    def __init__(self, folder: Path, patterns: Iterable[_Pattern]) -> None:
        self._folder = folder
        self._patterns = tuple(patterns)

    @classmethod
    def by_resileignore(cls, folder: Path) -> Self:
        """Read the `.resileignore` of ``folder``, if there is one. Raises UsageError if it is invalid."""
        file = folder / RESILEIGNORE
        try:
            lines = _lines(file)
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        patterns = []
        for number, line in enumerate(lines, 1):
            try:
                patterns.append(_Pattern(line))
            except ValueError as error:
                raise UsageError(
                    f"{file}, line {number}: {os.fsdecode(line)!r} is not a pattern of a .gitignore"
                ) from error
        return cls(folder, patterns)

    @classmethod
    def by_git(cls, folder: Path, file: Path) -> Self:
        """Read a ``file`` as Git does, which ignores what is no pattern, links, and what it cannot read."""
        patterns = []
        with suppress(OSError):
            for line in [] if file.is_symlink() else _lines(file):
                with suppress(ValueError):
                    patterns.append(_Pattern(line))
        return cls(folder, patterns)

    def includes(self, path: Path, *, is_folder: bool) -> bool | None:
        """Whether ``path``, in a folder that is not ignored, is ignored (False) or asked for (True); None for neither.

        The last pattern that it matches counts.
        """
        below = path.relative_to(self._folder)
        found = (pattern.includes(below, is_folder=is_folder) for pattern in reversed(self._patterns))
        return next((includes for includes in found if includes is not None), None)


def _lines(file: Path) -> list[bytes]:
    """Return the lines of a file of patterns, none without one."""
    try:
        text = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line.removesuffix(b"\r") for line in text.split(b"\n")]


class GitIgnored:
    """What Git ignores below the folder ``root``: by each .gitignore from the root of the repository on down.

    A ``root`` that is ignored itself counts as a repository of its own: somebody asks for what is in it.
    """

    def __init__(self, root: Path) -> None:
        self._files: dict[Path, IgnoredFiles] = {}
        self._enter(next((folder for folder in (root, *root.parents) if os.path.exists(folder / ".git")), root))
        if any(self.has(folder) for folder in (root, *root.parents) if self._repository in folder.parents):
            self._enter(root)

    def _enter(self, repository: Path) -> None:
        self._repository = repository
        self._exclude = IgnoredFiles.by_git(repository, repository / ".git" / "info" / "exclude")

    def has(self, path: Path) -> bool:
        """Whether ``path``, in a folder that is not ignored, is ignored."""
        is_folder = os.path.isdir(path) and not path.is_symlink()  # a link is a file to Git
        for folder in path.parents:
            found = self._of(folder).includes(path, is_folder=is_folder)
            if found is not None:
                return not found
            if folder == self._repository:
                break
        return self._exclude.includes(path, is_folder=is_folder) is False

    def _of(self, folder: Path) -> IgnoredFiles:
        if folder not in self._files:
            self._files[folder] = IgnoredFiles.by_git(folder, folder / ".gitignore")
        return self._files[folder]
