"""Decides which files and folders of a project are packed for a job, and says why others are not.

Left out without a word are only what ``.resileignore`` names and what tools generate (`GENERATED`). Left out and named
are virtual environments and, unless a pattern of ``.resileignore`` that begins with ``!`` asks for them, what a
``.gitignore`` names, hidden files, files that usually hold secrets, and homes of Resile. A link is judged by what it
leads to as well. A link to a folder of the project is followed: what it contains is packed under the link's name too.
"""

import os
import stat
from pathlib import Path

from resile_shared.home import is_home

from .ignore_files import RESILEIGNORE, GitIgnored, IgnoredFiles
from .secret_files import holds_a_key, is_secret_name

NEVER_PACKED = frozenset({"__pycache__", "node_modules"})
GENERATED = NEVER_PACKED | {
    *(".git", ".gitattributes", ".github", ".gitignore", ".gitmodules", ".hg", ".svn", RESILEIGNORE),
    *(".coverage", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".nox", ".pytest_cache", ".ruff_cache", ".tox"),
    *(".DS_Store", ".idea", ".vscode"),
    "demo-out",
}
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
MAX_LINKS = 100
"""At most this many links to folders are followed: those that lead to each other can be combined endlessly."""


class ProjectFiles:
    """Judges the entries of the folder ``root``, a resolved path, and of the folders below it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._resileignore = IgnoredFiles.by_resileignore(root)
        self._gitignore = GitIgnored(root)
        self._num_links = 0

    def is_unwanted(self, entry: Path) -> bool:
        """Whether ``entry`` is left out without a word."""
        if entry.name in GENERATED or entry.suffix == ".pyc":
            return True
        return self._resileignore.includes(entry, is_folder=os.path.isdir(entry)) is False

    def obstacle(self, entry: Path) -> str:
        """Return why ``entry`` is not packed; empty if it is. Raises FileNotFoundError if it was removed meanwhile."""
        return self._unpackable(entry) or self._unasked(entry)

    def _unasked(self, entry: Path) -> str:
        """Return why ``entry`` is not packed unless `.resileignore` asks for it."""
        is_folder = os.path.isdir(entry)
        if self._resileignore.includes(entry, is_folder=is_folder):
            return ""
        return self._secrecy(entry, is_folder=is_folder) or ("in .gitignore" if self._gitignore.has(entry) else "")

    def _secrecy(self, entry: Path, *, is_folder: bool) -> str:
        if entry.name.startswith("."):
            return "hidden"
        if entry.is_symlink():
            target = entry.resolve()
            below = target.relative_to(self._root) if target.is_relative_to(self._root) else target
            if any(part.startswith(".") for part in below.parts):
                return "link to what is hidden"
            if is_secret_name(target.name):
                return "link to what may be a secret"
        if is_folder and is_home(entry):
            return "a home of Resile"
        is_secret = is_secret_name(entry.name) and not os.path.exists(entry / "__init__.py")
        return "may be a secret" if is_secret or (not is_folder and holds_a_key(entry)) else ""

    def _unpackable(self, entry: Path) -> str:
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
