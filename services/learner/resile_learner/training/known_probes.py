"""Outcomes of the probe step, shared by the workers of a job on one host.

The step takes some 30 ms of processor time, a fifth of what a small job's worker needs until it can join. Workers of
one fork server have the same binaries. So what one of them has computed holds for the others of its job, as long as
what chooses the kernels is the same: processor, environment, settings of torch, and the libraries that are loaded.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ..probe import probe_digest

_DIGEST_LENGTH = 64


class KnownProbes:
    """The outcomes stored in ``folder``; None: none are known or stored. ``settings`` are those of torch, as text."""

    def __init__(self, folder: Path | None, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._settings = settings

    def digest(self, device: torch.device, described: str) -> str:
        """Return what `probe_digest` returns for ``device``: see `Probe`."""
        if self._folder is None or device.type != "cpu":
            return probe_digest(device)
        try:
            file = self._folder / self._key(described)
        except OSError:  # a system that does not say
            return probe_digest(device)
        with contextlib.suppress(OSError):
            known = file.read_text()
            if len(known) == _DIGEST_LENGTH:
                return known
        digest = probe_digest(device)
        with contextlib.suppress(OSError):  # a full disk: the next worker computes it again
            draft = file.with_name(f"{file.name}.{os.getpid()}")
            draft.write_text(digest)
            draft.rename(file)
        return digest

    def _key(self, described: str) -> str:
        content = repr((described, torch.get_num_threads(), dict(self._settings), _loaded_libraries()))
        return f"probe-{hashlib.sha256(content.encode()).hexdigest()[:32]}"


def _loaded_libraries() -> list[str]:
    """The files of the shared libraries in this process. Asking its modules would copy the memory of each."""
    with open("/proc/self/maps") as maps:
        paths = {line[line.find("/") :].rstrip("\n") for line in maps if ".so" in line}
    return sorted(paths)
