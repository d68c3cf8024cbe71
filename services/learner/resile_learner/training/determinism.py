"""Making a shard give the same bits on every worker, and recording the operations for which that is impossible."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as _deterministic

NONDETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


class Reproducibility:
    """Whether a run gives the same bits whatever happens to it; ``str()`` of it is shown to the user."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.operations: set[str] = set()

    def __str__(self) -> str:
        if self._mode == "fast":
            return "fast"
        if self.operations:
            return "bits not guaranteed: " + ", ".join(sorted(self.operations))
        return "same bits"


@contextmanager
def deterministic(reproducibility: Reproducibility, *, threads: int) -> Iterator[None]:
    """Use deterministic algorithms and a fixed number of threads; restore the settings afterwards.

    An operation without a deterministic form is recorded in ``reproducibility`` instead of failing.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(_deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    _deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(threads)
    try:
        with _recording(reproducibility):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = before[3]
        torch.set_num_threads(before[4])


@contextmanager
def _recording(reproducibility: Reproducibility) -> Iterator[None]:
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        found = NONDETERMINISTIC.search(str(message))
        if found:
            reproducibility.operations.add(found.group(1))
        else:
            shown(message, category, *where, **more)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*does not have a deterministic implementation")
        warnings.showwarning = show
        yield
