"""Making one shard give the same bits anywhere, and noticing where that is impossible."""

import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as _deterministic

NONDETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


class Bits:
    """What can be said of a run's bits; ``str(bits)`` is shown to the user."""

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
def deterministic(bits: Bits, *, threads: int) -> Iterator[None]:
    """Deterministic algorithms and a fixed number of threads while training goes on; put back afterwards.

    An operation without a deterministic form is noted in ``bits`` instead of failing.
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
        with _noticing(bits):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = before[3]
        torch.set_num_threads(before[4])


@contextmanager
def _noticing(bits: Bits) -> Iterator[None]:
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        found = NONDETERMINISTIC.search(str(message))
        if found:
            bits.operations.add(found.group(1))
        else:
            shown(message, category, *where, **more)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*does not have a deterministic implementation")
        warnings.showwarning = show
        yield


def device_class(device: torch.device) -> str:
    """What has to be equal for equal bits: library version, instruction set, and model of the accelerator."""
    parts = [f"torch {torch.__version__}", platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join(parts)
