"""Packs code for a job as a tar.gz: a folder, or a script with the files beside it.

A folder is packed whole. With a script go the Python files beside it, the packages below its folder (folders with an
``__init__.py``), and other files of up to 1 MB beside it; in a home directory or a temporary folder it is packed alone.
 Never packed: hidden files, ``__pycache__``, virtual environments, links to folders. The same files give the
same bytes.
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

MAX_BYTES = 50 * 10**6
MAX_FILES = 5000
MAX_COMPANION_BYTES = 10**6
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


def pack(path: Path) -> Package:
    """Pack the script or the folder at ``path``. Raises UsageError if it is too large, or has no script."""
    if path.is_dir():
        folder = path.resolve()
        if _is_crowded(folder):
            raise UsageError(
                f"{folder} is a home or system folder and is not uploaded: move the code to a folder of its own"
            )
        script = _entry_point(folder)
        files = _whole(folder)
    else:
        script = _checked_script(path)
        folder = script.parent.resolve()
        files = iter([folder / script.name]) if _is_crowded(folder) else _companions(folder, script.name)
    chosen = _within_limits(folder, files)
    return Package(_archive(chosen), script.name, tuple(chosen))


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


def _companions(folder: Path, script: str) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir():
            if (entry / "__init__.py").is_file():
                yield from _whole(entry)
        elif entry.name == script or entry.suffix == ".py" or entry.stat().st_size <= MAX_COMPANION_BYTES:
            yield entry


def _whole(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir():
            yield from _whole(entry)
        else:
            yield entry


def _entries(folder: Path) -> Iterator[Path]:
    """Files and folders of ``folder`` that may be packed, by name."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UsageError(f"{folder} cannot be packed: {error.strerror}: check its permissions") from error
    for name in names:
        entry = folder / name
        if name.startswith(".") or name in _NEVER_PACKED or entry.suffix == ".pyc":
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
                "keep data elsewhere, and have the script read it by its full path or a URL"
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
