"""The copy of the code that a run begins with, in the run's folder, and what has changed since then.

All Python files of the script's project are copied: workers that start later run these, whatever is edited meanwhile.
The project is the nearest folder above the script with a mark of one, such as ``.git``; else the script's own folder.
"""

import os
import shlex
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copy2

from resile_learner.code_copy import used_files
from resile_learner.messages import CodeCopy
from resile_shared.errors import ResileError, UsageError
from resile_shared.folders import remove_tree

from ..package import MAX_BYTES, MAX_FOLDER_FILES, crowded_place
from ..project_files import ENVIRONMENT_MARKS, NEVER_PACKED
from .runs import Journal, RunFolder
from .settings import RunSettings

MAX_ENTRIES = 20_000
"""After this many files and folders of a project, the folders that are left are not looked into."""
MAX_NAMED = 5
_PROJECT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_ARGUMENTS = "arguments"
_PROJECT = ".project"
"""The file in a copy with the path of the project that was copied."""


def open_code(settings: RunSettings, folder: RunFolder) -> CodeCopy:
    """Return the copy of the code of the run in ``folder``; make it first, if the run is new or goes on with new code.

    Raises UsageError if the code has changed, and the run is resumed without a word about that.
    """
    script, resume = settings.script.absolute(), settings.resume
    project, changed = _copied_project(folder.code, script) or _project(script), folder.journal.changed
    if resume and folder.code.is_dir() and (new := _changes(settings, folder, project)):
        if resume.code is None:
            raise UsageError(_question(new, folder.job))
        if resume.code == "old":
            return CodeCopy(folder=str(project), copied_to=str(folder.code), changed=changed)
        changed = tuple(dict.fromkeys([*changed, *_abbreviated(new)]))
    if not folder.code.is_dir() or (resume and resume.code == "new"):
        try:
            _copy(script, project, folder.code)
        except OSError as error:
            raise ResileError(
                f"the code cannot be copied to the run's folder {folder.path}: {error.strerror}; choose a --home"
            ) from error
    return CodeCopy(folder=str(project), copied_to=str(folder.code), changed=changed)


def arguments(settings: RunSettings, journal: Journal) -> tuple[str, ...]:
    """Return the arguments of the script: those given, or those that the run had which is resumed."""
    keeps = settings.resume is not None and settings.resume.code == "old"
    return journal.args if keeps else settings.args or journal.args


def _changes(settings: RunSettings, folder: RunFolder, project: Path) -> list[str]:
    """Return the names of the files that workers have run and that are others now, and whether arguments are."""
    changed = [name for name in used_files(folder.code) if not _is_same(folder.code / name, project / name)]
    before = folder.journal.args
    if settings.args and settings.args != before:
        changed.append(f"{_ARGUMENTS} ({shlex.join(before) or 'none'})")
    return changed


def _question(changed: list[str], run: str) -> str:
    return (
        f"the run {run} began with other code or arguments; changed since then: {', '.join(_abbreviated(changed))}. "
        "Add `--code old` to resume with those that it began with, or `--code new` to resume with the present ones: "
        "its bits will then not be those of an undisturbed run"
    )


def _abbreviated(changed: list[str]) -> list[str]:
    more = len(changed) - MAX_NAMED
    return [*changed[:MAX_NAMED], f"{more} more files"] if more > 1 else changed


def _is_same(copied: Path, file: Path) -> bool:
    try:
        return copied.read_bytes() == file.read_bytes()
    except OSError:
        return False


def _project(script: Path) -> Path:
    """Return the folder of the project that the script belongs to."""
    for folder in script.parents:
        if crowded_place(folder):
            break
        if any((folder / mark).exists() for mark in _PROJECT_MARKS):
            return script.parent if _contains_resile(folder) else folder
    return script.parent


def _contains_resile(folder: Path) -> bool:
    """Whether this package itself is developed in ``folder``: a worker has imported it already."""
    own = Path(__file__)
    return own.is_relative_to(folder) and "site-packages" not in own.parts


def _copy(script: Path, project: Path, to: Path) -> None:
    """Copy the Python files of ``project`` with their times, as a whole or not at all."""
    draft = to.with_name(f"{to.name}.draft")
    if draft.exists():  # of a launcher that was killed
        remove_tree(draft)
    draft.mkdir(mode=0o700)
    (draft / _PROJECT).write_bytes(os.fsencode(project))  # first: the home may be in the project
    num_bytes = 0
    _copy_file(script, draft / script.relative_to(project))
    for file in _python_files(script.parent, project):
        with suppress(FileNotFoundError, PermissionError):
            num_bytes += file.stat().st_size
            if num_bytes > MAX_BYTES:
                break
            _copy_file(file, draft / file.relative_to(project))
    if to.exists():
        remove_tree(to)
    draft.rename(to)


def _copy_file(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    copy2(file, to)


def _copied_project(copied_to: Path, script: Path) -> Path | None:
    """Return the project that was copied; None if there is no copy, or the script is elsewhere now."""
    try:
        project = Path(os.fsdecode((copied_to / _PROJECT).read_bytes()))
    except FileNotFoundError:
        return None
    return project if script.is_relative_to(project) else None


def _python_files(first: Path, project: Path) -> Iterator[Path]:
    """Yield the Python files of ``project``, those near the top of the folder ``first`` before others.

    Hidden folders, environments, copies of code, links to folders, and large folders that are no packages are left out.
    """
    waiting, seen, num_left = deque([first, project]), set(), MAX_ENTRIES
    while waiting and num_left > 0:
        folder = waiting.popleft()
        if folder in seen:
            continue
        seen.add(folder)
        entries = _entries(folder, most=num_left)
        num_left -= len(entries)
        is_package = any(entry.name == "__init__.py" for entry in entries)
        if len(entries) > MAX_FOLDER_FILES and not is_package and folder != first:
            continue
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                if not (crowded_place(folder) or _is_left_out(entry)):
                    waiting.append(Path(entry.path))
            elif entry.name.endswith(".py") and entry.is_file():
                yield Path(entry.path)


def _entries(folder: Path, *, most: int) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry, _ in zip(entries, range(most), strict=False)]
    except OSError:  # not readable, or removed meanwhile
        return []


def _is_left_out(folder: "os.DirEntry[str]") -> bool:
    return (
        folder.name.startswith(".")
        or folder.name in NEVER_PACKED
        or any(os.path.exists(os.path.join(folder.path, mark)) for mark in (*ENVIRONMENT_MARKS, _PROJECT))
    )
