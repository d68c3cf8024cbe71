"""Files that `.resileignore` and `.gitignore` name, as Git reads these: a fuzz test compares with `git ls-files`."""

import codecs
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from resile_shared.errors import UsageError

RESILEIGNORE = ".resileignore"
_TRAILING_SPACES = re.compile(r"(?<!\\) +$")
_NEVER = re.compile(r"(?!)")
_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": " \\t\\n\\r\\f\\v",
    "blank": " \\t",
    "punct": "!-/:-@\\[-`{-~",
    "xdigit": "0-9a-fA-F",
    "print": " -~",
    "graph": "!-~",
    "cntrl": "\\x00-\\x1f\\x7f",
}
"""The classes of characters that a bracket may name, as ``[[:digit:]]``, in a regular expression."""


class Ruling(NamedTuple):
    """What the last pattern that a path matches says of it."""

    is_asked_for: bool
    """Whether it is asked for, by a pattern with a ``!``; else it is ignored."""
    is_by_name: bool
    """Whether the pattern has no wildcard in its last part."""


class _Pattern:
    """A line of a .gitignore. It matches a path itself: what is below an ignored folder is never asked about."""

    def __init__(self, line: bytes) -> None:
        """Raise ValueError for a line that is no pattern."""
        text = _TRAILING_SPACES.sub("", line.decode("latin-1"))  # Git compares bytes: é is two for `?`
        self.ruling = Ruling(
            text.startswith("!"), is_by_name=not re.search(r"[*?[]", text.rstrip("/").rpartition("/")[2])
        )
        text = text.removeprefix("!")
        self._is_for_folders = text.endswith("/")
        text = text.removesuffix("/").replace("\\/", "/")
        if not text.strip("/"):
            raise ValueError("it names nothing")
        self._is_for_names = "/" not in text
        parts = _split(text.removeprefix("/"))
        self._parts = [None if set(part) == {"*"} and len(part) > 1 else _part(part) for part in parts]
        """Regular expressions of the parts of a path, and None for ``**``."""

    def matches(self, parts: Sequence[str], *, is_folder: bool) -> bool:
        """Whether a path with these parts, as latin-1, matches."""
        if self._is_for_folders and not is_folder:
            return False
        return self._match(parts[-1:] if self._is_for_names else parts)

    def _match(self, parts: Sequence[str]) -> bool:
        last = len(self._parts) - 1
        reached = {0}
        for part in parts:
            for at in range(last):  # stars between slashes may stand for nothing
                if at in reached and self._parts[at] is None:
                    reached.add(at + 1)
            following: set[int] = set()
            for at in (at for at in reached if at <= last):
                expression = self._parts[at]
                if expression is None:
                    following |= {at, at + 1} if at == last else {at}
                elif expression.fullmatch(part):
                    following.add(at + 1)
            reached = following
        return last + 1 in reached


def _split(text: str) -> list[str]:
    """Return what is between the slashes of a pattern; one in a bracket is none."""
    parts, at, begin = [], 0, 0
    while at < len(text):
        if text[at] == "/":
            parts.append(text[begin:at])
            begin = at + 1
        bracket = _bracket(text, at + 1) if text[at] == "[" else None
        at = bracket[1] if bracket else at + 1 + (text[at] == "\\")
    return [*parts, text[begin:]]


def _part(text: str) -> re.Pattern[str]:
    """Return a regular expression for what is between two slashes of a pattern; a backslash at its end matches nothing.

    Stars give up nothing that they have taken, so that no name takes long.
    """
    fixed = [""]
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "*":
            fixed += [""] if text[at - 2 : at - 1] != "*" or at == 1 else []
        elif character == "?":
            fixed[-1] += "."
        elif character == "[":
            found = _bracket(text, at)
            if found is None:
                return _NEVER
            expression, at = found
            fixed[-1] += expression
        elif character == "\\":
            if at == len(text):
                return _NEVER
            fixed[-1] += re.escape(text[at])
            at += 1
        else:
            fixed[-1] += re.escape(character)
    if len(fixed) == 1:
        return re.compile(fixed[0], re.DOTALL)
    between = "".join(f"(?>.*?{each})" for each in fixed[1:-1])
    return re.compile(f"{fixed[0]}{between}.*{fixed[-1]}", re.DOTALL)


def _bracket(text: str, at: int) -> tuple[str, int] | None:
    """Return the expression of a bracket whose content begins at ``at``, and where it ends; None: it does not end."""
    is_negated = text[at : at + 1] in ("!", "^")
    at += is_negated
    begin, items = at, ""
    while True:
        if at >= len(text):
            return None
        if text[at] == "]" and at > begin:
            break
        if named := re.compile(r"\[:([a-z]*):\]").match(text, at):
            if named[1] not in _CLASSES:
                return None
            items += _CLASSES[named[1]]
            at = named.end()
            continue
        first, at = _character(text, at)
        if text[at : at + 1] == "-" and text[at + 1 : at + 2] not in ("]", ""):
            final, at = _character(text, at + 1)
            items += re.escape(first) + (f"-{re.escape(final)}" if first <= final else "")
        else:
            items += re.escape(first)
    inside = f"[{'^' if is_negated else ''}{items}]" if items else ("." if is_negated else "(?!)")
    return inside, at + 1


def _character(text: str, at: int) -> tuple[str, int]:
    return (text[at + 1], at + 2) if text[at] == "\\" and at + 1 < len(text) else (text[at], at + 1)


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
                patterns += [_Pattern(line)] if _says_something(line) else []
            except ValueError as error:
                shown = os.fsdecode(line)
                raise UsageError(f"{file}, line {number}: {shown!r} is not a pattern of a .gitignore") from error
        return cls(folder, patterns)

    @classmethod
    def by_git(cls, folder: Path, file: Path) -> Self:
        """Read a ``file`` as Git does, which ignores what is no pattern, links, and what it cannot read."""
        patterns = []
        with suppress(OSError):
            for line in [] if file.is_symlink() else _lines(file):
                with suppress(ValueError):
                    patterns += [_Pattern(line)] if _says_something(line) else []
        return cls(folder, patterns)

    def ruling(self, path: Path, *, is_folder: bool) -> Ruling | None:
        """What the last pattern that ``path``, in a folder that is not ignored, matches says of it; None for none."""
        if not self._patterns:
            return None
        parts = os.fsencode(path.relative_to(self._folder)).decode("latin-1").split("/")
        found = (pattern for pattern in reversed(self._patterns) if pattern.matches(parts, is_folder=is_folder))
        return next((pattern.ruling for pattern in found), None)


def _lines(file: Path) -> list[bytes]:
    """Return the lines of a file of patterns, none without one."""
    try:
        text = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line.removesuffix(b"\r") for line in text.split(b"\n")]


def _says_something(line: bytes) -> bool:
    return bool(line.strip(b" ")) and not line.startswith(b"#")


class GitIgnored:
    """What Git ignores below the folder ``root``: by each .gitignore from the root of the repository on down.

    A ``root`` that is ignored itself was asked for; what else is ignored in it stays so.
    """

    def __init__(self, root: Path) -> None:
        self._files: dict[Path, list[IgnoredFiles]] = {}
        self._repository = next((folder for folder in (root, *root.parents) if os.path.exists(folder / ".git")), root)

    def has(self, path: Path) -> bool:
        """Whether ``path``, in a folder that is not ignored, is ignored."""
        is_folder = os.path.isdir(path) and not path.is_symlink()  # a link is a file to Git
        excluded = []
        for folder in path.parents:
            own, exclude = self._of(folder)
            if ruling := own.ruling(path, is_folder=is_folder):
                return not ruling.is_asked_for
            excluded.append(exclude.ruling(path, is_folder=is_folder))
            if folder == self._repository:
                break
        ruling = next(filter(None, excluded), None)
        return ruling is not None and not ruling.is_asked_for

    def _of(self, folder: Path) -> list[IgnoredFiles]:
        """Return the patterns of a folder's .gitignore, and those of its repository alone if it is one."""
        if folder not in self._files:
            names = (folder / ".gitignore", _git_folder(folder) / "info" / "exclude")
            self._files[folder] = [IgnoredFiles.by_git(folder, file) for file in names]
        return self._files[folder]


def _git_folder(folder: Path) -> Path:
    """Return where a repository keeps what its worktrees share; in those, and in submodules, ``.git`` is a file."""
    git = folder / ".git"
    try:
        git = folder / git.read_text(errors="replace").removeprefix("gitdir:").strip()
        return git / (git / "commondir").read_text(errors="replace").strip()
    except OSError:
        return git
