"""Finds the modules that a script has imported itself, by names that a template can import."""

import os
import sys
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType

import torch

from ..messages import MAX_IMPORTED


class ImportWatch:
    """Finds the modules that are imported after it was made, in a process whose script is in ``folder``."""

    def __init__(self, folder: str) -> None:
        self._num_before = len(sys.modules)
        self._folder = folder
        self._path = [entry for entry in sys.path if entry]
        self._settings = _settings()

    def imported(self) -> tuple[str, ...]:
        """Return the modules in the order of their imports.

        Empty if they are too many to be real, or if the variables or defaults of this process have changed since: what
        is imported after that may depend on it, and a template would import it without.
        """
        if _settings() != self._settings:
            return ()
        # Only the newest: to touch a module or its name in a forked process copies their memory.
        newest = list(islice(reversed(sys.modules.items()), max(0, len(sys.modules) - self._num_before)))
        found = [
            name
            for name, module in reversed(newest)
            if len(name) <= 200 and is_importable(name, module, self._path, self._folder)
        ]
        return tuple(found) if len(found) <= MAX_IMPORTED else ()


def _settings() -> tuple[dict[str, str], torch.dtype, torch.device]:
    """What the code of a module may look at while it is imported, and a script can set."""
    return dict(os.environ), torch.get_default_dtype(), torch.get_default_device()


def is_importable(name: str, module: object, path: Sequence[str], folder: str) -> bool:
    """Whether another process with ``path`` gets the same module by its name; nothing in ``folder`` counts."""
    spec = getattr(module, "__spec__", None)
    if not isinstance(module, ModuleType) or spec is None or spec.name != name:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    if not (spec.has_location and isinstance(spec.origin, str)):
        return False
    return not _is_below(spec.origin, [folder]) and _is_below(spec.origin, path)


def _is_below(file: str, folders: Collection[str]) -> bool:
    parents = Path(file).parents
    return any(Path(folder) in parents for folder in folders)
