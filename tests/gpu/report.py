"""The report of the checklist: what passed, what failed, what was left out, and on which machine."""

import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class Skip(Exception):
    """A check cannot be made here; the message says why."""


@dataclass
class Report:
    """Runs checks one after the other, and keeps their results."""

    is_dry: bool
    rows: list[tuple[str, str, float, str]] = field(default_factory=list)
    """Name, result, seconds, note."""

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Run a check, which returns a note, and raises `Skip`, or anything else if it fails."""
        begun = time.monotonic()
        try:
            result, note = PASSED, run()
        except Skip as skip:
            result, note = SKIPPED, str(skip)
        except Exception as error:
            traceback.print_exc()
            result, note = FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.rows.append((name, result, time.monotonic() - begun, note))
        print(f"{result:8}{name}  {note}", flush=True)

    @property
    def has_failed(self) -> bool:
        """Whether a check has failed."""
        return any(result == FAILED for _, result, _, _ in self.rows)

    def text(self) -> str:
        """The report, in Markdown."""
        title = "dry run on a CPU: it says nothing about GPUs" if self.is_dry else "checklist on GPUs"
        counts = ", ".join(
            f"{sum(row[1] == result for row in self.rows)} {result}" for result in (PASSED, FAILED, SKIPPED)
        )
        lines = [f"# Resile, {title}", "", *machine(), "", counts, "", "| check | result | seconds | note |"]
        lines.append("|---|---|---|---|")
        lines += [f"| {name} | {result} | {took:.1f} | {note} |" for name, result, took, note in self.rows]
        return "\n".join(lines)


def machine() -> list[str]:
    """Lines about this machine."""
    lines = [f"- torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        lines.append(f"- CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        lines += [f"- GPU {number}: {line}" for number, line in enumerate(found)]
    return lines
