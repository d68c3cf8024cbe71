"""Packs code for a job as a tar.gz: a folder, or a script with the files beside and below it.

A folder is packed whole. With a script go the Python files beside and below it, the packages (folders with an
``__init__.py``) whole, and other files of up to 1 MB. A folder that is no package is left out if it has more than 1000
files or 10 MB, is not readable, or does not fit beside the rest. In a home directory or a temporary folder a script is
packed alone. `project_files` says what else is never packed. The same files give the same bytes.
"""

import gzip
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resile_shared.errors import UsageError
from resile_shared.home import is_home

from .project_files import ProjectFiles

MAX_BYTES = 50 * 10**6
MAX_FILES = 5000
MAX_COMPANION_BYTES = 10**6
MAX_FOLDER_BYTES = 10 * 10**6
MAX_FOLDER_FILES = 1000
"""A folder below a script that is not a package is left out if it has more files than this."""
_ENTRY_POINTS = ("train.py", "main.py")
MAX_NAMED = 10
"""At most this many of the files that are not sent are named."""


@dataclass(frozen=True)
class Package:
    """Packed code: what `POST /v1/packages` takes."""

    content: bytes
    script: str
    """Path of the script inside the package."""
    files: Mapping[str, int]
    """The bytes of each file."""
    left_out: tuple[str, ...] = ()
    """Files and folders that nobody asked to leave out, with the reasons."""

    @property
    def warning(self) -> str:
        """What is not sent and why, in one line; empty if everything is."""
        if not self.left_out:
            return ""
        num_more = len(self.left_out) - MAX_NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        return (
            f"not sent: {', '.join(self.left_out[:MAX_NAMED])}{more}: jobs get data with --data, secrets with --env, "
            "packages with --with; a line in .resileignore leaves a file out, and one that begins with ! sends it"
        )


def pack(path: Path) -> Package:
    """Pack the script or the folder at ``path``. Raises UsageError if it is too large, or has no script."""
    try:
        return _pack(path)
    except RecursionError as error:
        raise UsageError(f"{path} has folders nested too deeply: move the code to a folder of its own") from error


def _pack(path: Path) -> Package:
    if path.is_dir():
        folder = path.resolve()
        if kind := crowded_place(folder):
            raise UsageError(f"{folder} is {kind} and is not uploaded: move the code to a folder of its own")
        script = _entry_point(folder)
        whole = _Folder(folder, script.name)
        chosen = _within_limits(folder, whole.whole(folder))
        return _packed(chosen, script.name, tuple(whole.left_out))
    script = _checked_script(path)
    folder = script.parent.resolve()
    if not (kind := crowded_place(folder)):
        return _with_companions(folder, script.name)
    reason = f"all files beside {script.name} ({folder} is {kind})"
    return _packed({script.name: folder / script.name}, script.name, (reason,))


class _Unreadable(UsageError):
    """A folder cannot be listed."""


def _with_companions(folder: Path, script: str) -> Package:
    below = _Folder(folder, script)
    files, folders = below.beside_script()
    chosen = _within_limits(folder, files)
    num_bytes = sum(_num_bytes(file) for file in chosen.values())
    for each in folders:
        small = below.small(each, max_files=MAX_FILES - len(chosen), max_bytes=MAX_BYTES - num_bytes)
        chosen |= {file.relative_to(folder).as_posix(): file for file in small}
        num_bytes += sum(_num_bytes(file) for file in small)
    return _packed(chosen, script, tuple(below.left_out))


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


def crowded_place(folder: Path) -> str:
    """What ``folder`` is if it contains files unrelated to a script in it, else an empty text."""
    home = Path.home().resolve()
    if folder in (home, *home.parents, Path(tempfile.gettempdir()).resolve()):
        return "a home, system or temporary folder"
    return "in a home of Resile" if any(map(is_home, (folder, *folder.parents))) else ""


class _Folder:
    """What may be packed of a folder with a script; ``left_out`` are files and folders that do not go with it."""

    def __init__(self, root: Path, script: str) -> None:
        self.left_out: list[str] = []
        self._root = root
        self._script = root / script
        self._project = ProjectFiles(root)

    def whole(self, folder: Path) -> Iterator[Path]:
        """Yield all files of ``folder``. Raises UsageError if a folder cannot be read."""
        for entry in self._entries(folder):
            if entry.is_dir():
                yield from self.whole(entry)
            else:
                yield entry

    def beside_script(self) -> tuple[list[Path], list[Path]]:
        """Return the files that go with the script, with those of packages, and the folders that are not packages."""
        files: list[Path] = []
        folders: list[Path] = []
        for entry in self._entries(self._root):
            if not entry.is_dir():
                files += [entry] if entry == self._script or self._is_small(entry) else []
            elif _is_package(entry):
                files += self.whole(entry)
            else:
                folders.append(entry)
        return files, folders

    def small(
        self, folder: Path, *, max_files: int = MAX_FOLDER_FILES, max_bytes: int = MAX_FOLDER_BYTES
    ) -> list[Path]:
        """Return the files of ``folder``, which is not a package, that go with the script.

        Empty if they are too many or too large together; ``max_files`` and ``max_bytes`` can only lower these limits.
        """
        num_before = len(self.left_out)
        files: list[Path] = []
        num_bytes = 0
        reason = ""
        try:
            for file in self._companions(folder):
                files.append(file)
                num_bytes += _num_bytes(file)
                if reason := _excess(len(files), num_bytes, max_files=max_files, max_bytes=max_bytes):
                    break
        except _Unreadable:
            reason = "not readable"
        if reason:
            del self.left_out[num_before:]
            self._leave_out(folder, reason)
        return [] if reason else files

    def _companions(self, folder: Path) -> Iterator[Path]:
        for entry in self._entries(folder):
            if not entry.is_dir():
                if not _is_readable(entry):
                    self._leave_out(entry, "not readable")
                elif self._is_small(entry):
                    yield entry
            elif _is_package(entry):
                yield from self.whole(entry)
            else:
                yield from self.small(entry)

    def _is_small(self, file: Path) -> bool:
        """Whether a file goes with the script; if not, it is noted."""
        num_bytes = _num_bytes(file)
        if file.suffix == ".py" or num_bytes <= MAX_COMPANION_BYTES:
            return True
        self._leave_out(file, f"{num_bytes / 1e6:.0f} MB")
        return False

    def _leave_out(self, path: Path, reason: str) -> None:
        name = path.relative_to(self._root).as_posix()
        self.left_out.append(f"{name}{'/' if os.path.isdir(path) else ''} ({reason})")

    def _entries(self, folder: Path) -> Iterator[Path]:
        """Yield the files and folders of ``folder`` that may be packed, by name."""
        try:
            names = sorted(os.listdir(folder))
            if names:
                with suppress(FileNotFoundError):  # removed meanwhile
                    (folder / names[0]).lstat()  # names alone can be listed where files cannot be opened
        except FileNotFoundError:  # removed meanwhile
            return
        except OSError as error:
            raise _Unreadable(
                f"{folder} cannot be packed: {error.strerror}: check its permissions, or name it in .resileignore"
            ) from error
        if not names:
            self._leave_out(folder, "empty")
        for name in names:
            entry = folder / name
            if entry == self._script or self._is_packed(entry):
                yield entry

    def _is_packed(self, entry: Path) -> bool:
        """Whether ``entry`` is packed; if not, and nobody asked to leave it out, it is noted."""
        if self._project.is_unwanted(entry):
            return False
        with suppress(FileNotFoundError):  # removed meanwhile
            if obstacle := self._project.obstacle(entry):
                self._leave_out(entry, obstacle)
            return not obstacle
        return False


def _is_package(folder: Path) -> bool:
    return os.path.isfile(folder / "__init__.py")  # also where the folder may not be read


def _is_readable(file: Path) -> bool:
    try:
        file.open("rb").close()
    except OSError:
        return False
    return True


def _excess(num_files: int, num_bytes: int, *, max_files: int, max_bytes: int) -> str:
    """Why a folder of this size does not go with a script; empty if it does."""
    if num_bytes > min(max_bytes, MAX_FOLDER_BYTES):
        return (
            f"over {MAX_FOLDER_BYTES // 10**6} MB"
            if max_bytes >= MAX_FOLDER_BYTES
            else (f"over {MAX_BYTES // 10**6} MB with the rest")
        )
    if num_files > min(max_files, MAX_FOLDER_FILES):
        return (
            f"over {MAX_FOLDER_FILES} files"
            if max_files >= MAX_FOLDER_FILES
            else (f"over {MAX_FILES} files with the rest")
        )
    return ""


def _within_limits(folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    chosen: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    num_bytes = 0
    for file in files:
        name = file.relative_to(folder).as_posix()
        chosen[name] = file
        sizes[name] = _num_bytes(file)
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


def _num_bytes(file: Path) -> int:
    """Return the size of a file; 0 if it was removed meanwhile, as files of a run beside the script may be."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _packed(files: Mapping[str, Path], script: str, left_out: tuple[str, ...] = ()) -> Package:
    """Pack what is there of ``files``: those of a run beside the script may be removed meanwhile."""
    contents: dict[str, tuple[bytes, int]] = {}
    for name, file in sorted(files.items()):
        try:
            contents[name] = file.read_bytes(), file.stat().st_mode
        except FileNotFoundError as error:
            if name == script:
                raise UsageError(f"{file} was removed while it was packed: submit it again") from error
        except OSError as error:
            raise UsageError(f"{file} cannot be packed: {error.strerror}: check its permissions") from error
    sizes = {name: len(contents[name][0]) for name in files if name in contents}
    return Package(_archive(contents), script, sizes, left_out)


def _archive(contents: Mapping[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, (content, mode) in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if mode & stat.S_IXUSR else 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
