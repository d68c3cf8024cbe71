"""Packs code for a job as a tar.gz: a folder, or a script with the files beside and below it.

A folder is packed whole. With a script go the Python files beside and below it, the packages (folders with an
``__init__.py``) whole, and other files of up to 1 MB; a folder that is no package and has more than 1000 files or 10 MB
is left out. In a home directory or a temporary folder a script is packed alone. Never packed: what ``.resileignore``
names, hidden files, ``__pycache__``, virtual environments, links to folders. The same files give the same bytes.
"""

import gzip
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resile_shared.errors import UsageError

from .ignored_files import IgnoredFiles

MAX_BYTES = 50 * 10**6
MAX_FILES = 5000
MAX_COMPANION_BYTES = 10**6
MAX_FOLDER_BYTES = 10 * 10**6
MAX_FOLDER_FILES = 1000
"""Of a folder below a script that is no package."""
_ENTRY_POINTS = ("train.py", "main.py")
_NEVER_PACKED = frozenset({"__pycache__", "node_modules"})
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")


@dataclass(frozen=True)
class Package:
    """Packed code: what `POST /v1/packages` takes."""

    content: bytes
    script: str
    """Path of the script inside."""
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Files and folders that are too large, with their sizes."""


def pack(path: Path) -> Package:
    """Pack the script or the folder at ``path``. Raises UsageError if it is too large, or has no script."""
    if path.is_dir():
        folder = path.resolve()
        if _is_crowded(folder):
            raise UsageError(
                f"{folder} is a home or system folder and is not uploaded: move the code to a folder of its own"
            )
        script = _entry_point(folder)
        files = _Folder(folder).whole(folder)
    else:
        script = _checked_script(path)
        folder = script.parent.resolve()
        if not _is_crowded(folder):
            return _with_companions(folder, script.name)
        files = iter([folder / script.name])
    chosen = _within_limits(folder, files)
    return Package(_archive(chosen), script.name, tuple(chosen))


def _with_companions(folder: Path, script: str) -> Package:
    below = _Folder(folder)
    chosen = _within_limits(folder, below.companions(folder, script))
    return Package(_archive(chosen), script, tuple(chosen), tuple(below.left_out))


def _checked_script(script: Path) -> Path:
    if not script.exists():
        raise UsageError(f"there is no script or folder {script} in {Path.cwd()}: check the path")
    if not script.is_file() or not os.access(script, os.R_OK):
        raise UsageError(f"{script} is not a readable file: check the path and its permissions")
    return script


def _entry_point(folder: Path) -> Path:
    for name in _ENTRY_POINTS:
        if (folder / name).is_file():
            return folder / name
    scripts = sorted(folder.glob("*.py"))
    if len(scripts) != 1:
        what = f"{len(scripts)} Python files" if scripts else "no Python file"
        raise UsageError(f"{folder} has {what} and no train.py or main.py: give the path of the script")
    return scripts[0]


def _is_crowded(folder: Path) -> bool:
    """Whether it contains files unrelated to a script in it."""
    home = Path.home().resolve()
    return folder in (home, *home.parents, Path(tempfile.gettempdir()).resolve())


class _Folder:
    """What may be packed of a folder; ``left_out`` are the files and folders that were too large."""

    def __init__(self, root: Path) -> None:
        self.left_out: list[str] = []
        self._root = root
        self._ignored = IgnoredFiles(root)

    def whole(self, folder: Path) -> Iterator[Path]:
        """Yield all files of ``folder``."""
        for entry in self._entries(folder):
            if entry.is_dir():
                yield from self.whole(entry)
            else:
                yield entry

    def companions(self, folder: Path, script: str = "") -> Iterator[Path]:
        """Yield the files of ``folder`` that go with a script: small ones, Python files and packages."""
        for entry in self._entries(folder):
            if entry.is_dir():
                if (entry / "__init__.py").is_file():
                    yield from self.whole(entry)
                else:
                    yield from self._small(entry)
            elif self._is_code(entry, script) or entry.stat().st_size <= MAX_COMPANION_BYTES:
                yield entry
            else:
                self._leave_out(entry, f"{entry.stat().st_size / 1e6:.0f} MB")

    def _is_code(self, file: Path, script: str) -> bool:
        return file.suffix == ".py" or file == self._root / script

    def _small(self, folder: Path) -> list[Path]:
        """The files of ``folder`` that go with a script, unless they are many or large together."""
        num_before = len(self.left_out)
        files: list[Path] = []
        num_bytes = 0
        for file in self.companions(folder):
            files.append(file)
            num_bytes += file.stat().st_size
            if len(files) > MAX_FOLDER_FILES or num_bytes > MAX_FOLDER_BYTES:
                del self.left_out[num_before:]
                large = f"over {MAX_FOLDER_BYTES // 10**6} MB"
                self._leave_out(folder, large if num_bytes > MAX_FOLDER_BYTES else f"over {MAX_FOLDER_FILES} files")
                return []
        return files

    def _leave_out(self, path: Path, size: str) -> None:
        name = path.relative_to(self._root).as_posix()
        self.left_out.append(f"{name}{'/' if path.is_dir() else ''} ({size})")

    def _entries(self, folder: Path) -> Iterator[Path]:
        """Yield the files and folders of ``folder`` that may be packed, by name."""
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise UsageError(f"{folder} cannot be packed: {error.strerror}: check its permissions") from error
        for name in names:
            entry = folder / name
            if name.startswith(".") or name in _NEVER_PACKED or entry.suffix == ".pyc":
                continue
            if self._ignored.has(entry, is_folder=entry.is_dir()):
                continue
            is_foreign = entry.is_symlink() or any((entry / mark).exists() for mark in _ENVIRONMENT_MARKS)
            if entry.is_file() or (entry.is_dir() and not is_foreign):
                yield entry


def _within_limits(folder: Path, files: Iterator[Path]) -> dict[str, Path]:
    chosen: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    num_bytes = 0
    for file in files:
        name = file.relative_to(folder).as_posix()
        chosen[name] = file
        sizes[name] = file.stat().st_size
        num_bytes += sizes[name]
        if len(chosen) > MAX_FILES:
            raise UsageError(f"{folder} contains more than {MAX_FILES} files: move the code to a folder of its own")
        if num_bytes > MAX_BYTES:
            largest = max(sizes, key=lambda name: sizes[name])
            raise UsageError(
                f"{folder} contains more than {MAX_BYTES // 10**6} MB, such as {largest} "
                f"({sizes[largest] / 1e6:.0f} MB): "
                "keep data elsewhere (`resile dataset`, docs/data.md), or name it in .resileignore"
            )
    return chosen


def _archive(files: dict[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, file in sorted(files.items()):
            try:
                content = file.read_bytes()
            except OSError as error:
                raise UsageError(f"{file} cannot be packed: {error.strerror}: check its permissions") from error
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if file.stat().st_mode & stat.S_IXUSR else 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
