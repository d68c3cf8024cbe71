"""Runs the product with one protection switched off: a mutant, made by replacing a piece of source as it is imported.

A mutant is named before any module of the product is imported (`install`), so it acts in a process of its own.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


@dataclass(frozen=True)
class Mutant:
    """One protection, and how it is switched off: ``old`` is replaced by ``new`` in the source of ``module``."""

    name: str
    protects: str
    """What goes wrong without it."""
    module: str
    old: str
    new: str
    once_missing: bool = False
    """Whether the protocol was without it at some time, and nothing noticed."""

    def source(self) -> str:
        """Return the mutated source. Raises ValueError unless ``old`` is there exactly once."""
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {text.count(self.old)} times in {self.module}")
        return text.replace(self.old, self.new)


class _Loader(SourceFileLoader):
    """Loads the mutated source, whatever is cached."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        text = Path(path).read_text()
        assert text.count(self._mutant.old) == 1, f"{self._mutant.name} does not apply"
        return compile(text.replace(self._mutant.old, self._mutant.new), path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(self._mutant, spec.origin)
        return spec


def install(mutant: Mutant) -> None:
    """Let ``mutant`` act in this process."""
    assert mutant.module not in sys.modules, "a mutant acts only on what is imported after it"
    sys.meta_path.insert(0, _Finder(mutant))
