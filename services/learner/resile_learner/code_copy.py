"""Runs the Python files of a project as they were when its run began, from a copy, whatever is in their folder now.

A worker that starts later, as one that joins or that resumes, would otherwise import what was edited meanwhile. Modules
keep their names, their ``__file__`` and their place in tracebacks: only the text comes from the copy. Other files are
read where they are, and so are modules that the copy lacks, such as those that a script writes itself.
"""

import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType

from .messages import CodeCopy

USED = ".used"
"""The file in a copy that lists the files of it that workers have run."""


def install_code_copy(copy: CodeCopy) -> None:
    """Import the modules of the copied folder from its copy, in this process and in those that it forks."""
    code = _Code(copy)
    sys.path_hooks.insert(0, code.finder)
    for path in list(sys.path_importer_cache):
        if code.has_folder(path):
            del sys.path_importer_cache[path]


def read_code(file: str, copy: CodeCopy | None) -> bytes:
    """Return the content of a Python file: that of its copy, if there is one, which tracebacks will then show."""
    return _Code(copy).read(file) if copy else Path(file).read_bytes()


class _Code:
    def __init__(self, copy: CodeCopy) -> None:
        self._folder = os.path.realpath(copy.folder)
        self._copy = copy.copied_to

    def finder(self, path: str) -> "_CopyFinder":
        """Return what finds modules in the folder ``path``. Raises ImportError if there is no copy of it."""
        if not self.has_folder(path):
            raise ImportError("there is no copy of the folder", path=path)
        return _CopyFinder(self, path)

    def has_folder(self, path: str) -> bool:
        """Whether there is a copy of the folder ``path``."""
        return (copied := self._copied(path or ".")) is not None and os.path.isdir(copied)

    def copied(self, file: str) -> str | None:
        """Return the path of the copy of ``file``; None if there is none."""
        folder, name = os.path.split(file)
        copied = self._copied(folder)
        return os.path.join(copied, name) if copied and os.path.isfile(os.path.join(copied, name)) else None

    def read(self, file: str) -> bytes:
        """Return the content of ``file`` when the run began, and let tracebacks show that."""
        copied = self.copied(file)
        with open(copied or file, "rb") as stream:
            content = stream.read()
        if copied:
            with suppress(SyntaxError, UnicodeDecodeError):  # which compiling it will raise
                lines = decode_source(content).splitlines(keepends=True)
                linecache.cache[file] = len(content), None, lines, file  # without a time it is not read again
            self._note_use(os.path.relpath(copied, self._copy))
        return content

    def _copied(self, path: str) -> str | None:
        real = os.path.realpath(path)
        if real == self._folder:
            return self._copy
        return self._copy + real[len(self._folder) :] if real.startswith(os.path.join(self._folder, "")) else None

    def _note_use(self, name: str) -> None:
        file = os.path.join(self._copy, USED)
        with suppress(OSError), open(file, "a+b", buffering=0) as used:  # a full disk: a resume then compares all
            used.seek(0)
            line = os.fsencode(name) + b"\n"
            if line not in used.readlines():
                used.write(line)


class _CopyFinder(FileFinder):
    """Finds modules in a folder as it was; `pkgutil` lists it as any other."""

    def __init__(self, code: _Code, path: str) -> None:
        self._code = code
        self._load = partial(_CopyLoader, code)
        super().__init__(
            path,
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (self._load, SOURCE_SUFFIXES),  # type: ignore[arg-type] # it is only called
            (SourcelessFileLoader, BYTECODE_SUFFIXES),
        )

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        found = super().find_spec(fullname, target)
        if found is not None and isinstance(found.loader, ExtensionFileLoader):
            return found
        return self._find_copied(fullname) or found

    def _find_copied(self, fullname: str) -> ModuleSpec | None:
        path = os.path.join(self.path, fullname.rpartition(".")[2])
        for file, places in self._candidates(path):
            if self._code.copied(file):
                loader = self._load(fullname, file)
                return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=places)
        if not self._code.has_folder(path):
            return None
        spec = ModuleSpec(fullname, None)  # a part of a namespace package
        spec.submodule_search_locations = [path]
        return spec

    def _candidates(self, path: str) -> Iterator[tuple[str, list[str] | None]]:
        yield os.path.join(path, "__init__.py"), [path]
        yield f"{path}.py", None


class _CopyLoader(SourceFileLoader):
    def __init__(self, code: _Code, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._code = code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._code.read(self.path)  # for tracebacks, also where there is bytecode; here, so that they lack this line
        return super().create_module(spec)

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._code.copied(path) or path)

    def path_stats(self, path: str) -> dict[str, float]:
        return dict(super().path_stats(self._code.copied(path) or path))


def used_files(copied_to: Path) -> Sequence[str]:
    """Return the names, relative to the copy, of the files in it that workers have run."""
    try:
        return sorted({os.fsdecode(line) for line in (copied_to / USED).read_bytes().splitlines()})
    except FileNotFoundError:
        return ()
