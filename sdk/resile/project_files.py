"""Decides which files and folders of a project are packed for a job, and says why others are not.

Left out without a word are only what ``.resileignore`` names and what tools generate (`GENERATED`). Other hidden files
may be secrets; they stay out, as virtual environments do. A link to a folder of the project is followed: what it
contains is packed under the link's name as well.
"""

import os
import stat
from pathlib import Path

from pathspec import GitIgnoreSpec

from resile_shared.errors import UsageError

FILE = ".resileignore"
NEVER_PACKED = frozenset({"__pycache__", "node_modules"})
GENERATED = NEVER_PACKED | {
    *(".git", ".gitattributes", ".github", ".gitignore", ".gitmodules", ".hg", ".svn", FILE),
    *(".coverage", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".nox", ".pytest_cache", ".ruff_cache", ".tox"),
    *(".DS_Store", ".idea", ".vscode"),
}
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
MAX_LINKS = 100
"""At most this many links to folders are followed: those that lead to each other can be combined endlessly."""


class IgnoredFiles:
    """The files that the `.resileignore` of ``folder`` names, if there is one. Raises UsageError if it is invalid.

    Its patterns are those of a .gitignore.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / FILE
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError as error:
                raise UsageError(f"{file}, line {number}: {line!r} is not a pattern of a .gitignore") from error
        self._spec = GitIgnoreSpec.from_lines(lines)

    def has(self, path: Path, *, is_folder: bool) -> bool:
        """Whether ``path``, in a folder that is not ignored, is ignored."""
        name = path.relative_to(self._folder).as_posix()
        return self._spec.match_file(f"{name}/" if is_folder else name)


class ProjectFiles:
    """Judges the entries of the folder ``root``, a resolved path, and of the folders below it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ignored = IgnoredFiles(root)
        self._num_links = 0

    def is_unwanted(self, entry: Path) -> bool:
        """Whether ``entry`` is left out without a word."""
        if entry.name in GENERATED or entry.suffix == ".pyc":
            return True
        return self._ignored.has(entry, is_folder=os.path.isdir(entry))

    def obstacle(self, entry: Path) -> str:
        """Return why ``entry`` is not packed; empty if it is. Raises FileNotFoundError if it was removed meanwhile."""
        if entry.name.startswith("."):
            return "hidden"
        is_link = entry.is_symlink()
        try:
            mode = entry.stat().st_mode
        except FileNotFoundError:
            if not is_link:
                raise
            return "broken link"
        except OSError as error:
            return f"link that cannot be followed: {error.strerror}" if is_link else "not readable"
        if stat.S_ISREG(mode):
            return ""
        if not stat.S_ISDIR(mode):
            return "not a regular file"
        if any(os.path.exists(entry / mark) for mark in ENVIRONMENT_MARKS):
            return "virtual environment"
        return self._obstacle_of_link(entry) if is_link else ""

    def _obstacle_of_link(self, link: Path) -> str:
        if self._num_links == MAX_LINKS:
            return f"after {MAX_LINKS} links to folders"
        target = link.resolve()
        if not target.is_relative_to(self._root):
            return f"link out of the folder, to {target}"
        if any(folder.resolve().is_relative_to(target) for folder in link.parents if folder.is_relative_to(self._root)):
            return "link to a folder that contains it"
        self._num_links += 1
        return ""
