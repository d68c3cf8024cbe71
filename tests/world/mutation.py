"""Runs the product with protections switched off: mutants, made by replacing pieces of source as they are imported.

Mutants are named before any module of the product is imported (`install`), so they act in a process of their own.
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
        """Return the mutated source of its module. Raises ValueError unless ``old`` is there exactly once."""
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        return mutated(Path(spec.origin).read_text(), [self])


def mutated(text: str, mutants: Sequence[Mutant]) -> str:
    """Return the source ``text`` of one module with ``mutants``. Raises ValueError unless each applies exactly once."""
    for mutant in mutants:
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: {mutant.old!r} is {text.count(mutant.old)} times in {mutant.module}")
        text = text.replace(mutant.old, mutant.new)
    return text


class _Loader(SourceFileLoader):
    """Loads a mutated source, whatever is cached."""

    def __init__(self, mutants: Sequence[Mutant], path: str) -> None:
        super().__init__(mutants[0].module, path)
        self._mutants = mutants

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(mutated(Path(path).read_text(), self._mutants), path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self._mutants = mutants

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        mine = [mutant for mutant in self._mutants if mutant.module == fullname]
        if not mine:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(mine, spec.origin)
        return spec


def install(*mutants: Mutant) -> None:
    """Let ``mutants`` act in this process, all at once."""
    assert sys.modules.keys().isdisjoint(m.module for m in mutants), "mutants act only on what is imported after them"
    sys.meta_path.insert(0, _Finder(mutants))
