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

from .ignore_files import RESILEIGNORE, GitIgnored, IgnoredFiles, Ruling
from .secret_files import holds_a_key, is_code, is_secret_name

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
        ruling = self._resileignore.ruling(entry, is_folder=os.path.isdir(entry))
        return ruling is not None and not ruling.is_asked_for

    def obstacle(self, entry: Path) -> str:
        """Return why ``entry`` is not packed; empty if it is. Raises FileNotFoundError if it was removed meanwhile."""
        return self._unpackable(entry) or self._unasked(entry)

    def _unasked(self, entry: Path) -> str:
        """Return why ``entry`` is not packed unless `.resileignore` asks for it, for a secret by its name."""
        ruling = self._resileignore.ruling(entry, is_folder=os.path.isdir(entry))
        if ruling == Ruling(is_asked_for=True, is_by_name=True):
            return ""
        if secrecy := self._secrecy(entry):
            return secrecy
        is_asked = ruling is not None and ruling.is_asked_for
        return "" if is_asked or not self._gitignore.has(entry) else "in .gitignore"

    def _secrecy(self, entry: Path) -> str:
        if entry.name.startswith("."):
            return "hidden"
        if entry.is_symlink() and (leads_to := self._secrecy_of_link(entry)):
            return leads_to
        if os.path.isdir(entry):
            if is_home(entry):
                return "a home of Resile"
            is_secret = is_secret_name(entry.name) and not os.path.exists(entry / "__init__.py")
            return "may be a secret" if is_secret else ""
        is_among_secrets = is_secret_name(entry.parent.name) and entry.parent != self._root and not is_code(entry.name)
        return "may be a secret" if is_among_secrets or is_secret_name(entry.name) or holds_a_key(entry) else ""

    def _secrecy_of_link(self, link: Path) -> str:
        """Judge all that a link leads through: each link on its way, and each folder, has a name of its own."""
        for passed in _passed(link):
            if not passed.is_relative_to(self._root):
                names, folders = passed.parts[1:], [passed, *passed.parents]
            else:
                below = passed.relative_to(self._root)
                names, folders = below.parts, [self._root / each for each in [below, *below.parents][:-1]]
                if any(self.is_unwanted(each) or self._gitignore.has(each) for each in folders):
                    return "link to what is ignored"
            if passed.is_relative_to("/proc") or passed.is_relative_to("/sys"):
                return "link to no ordinary file"
            if any(name.startswith(".") for name in names):
                return "link to a hidden file"
            if any(map(is_secret_name, names)):
                return "link to what may be a secret"
            if any(map(is_home, folders)):
                return "link into a home of Resile"
        return ""

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


def _passed(link: Path) -> list[Path]:
    """Return the path of each link that a link leads to, one after the other, and that of what it leads to at last."""
    passed: list[Path] = []
    at = link
    while at.is_symlink() and len(passed) < MAX_LINKS:
        at = Path(os.path.normpath(at.parent.resolve() / at.readlink()))
        passed.append(at)
    return [*passed, link.resolve()]
