"""A script whose state takes a while to store, and runs that are watched while they go on."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from resile_testing.waiting import PATIENCE_SECONDS

from .conftest import TRAIN, Ended

WIDE = TRAIN.replace(
    'parser.add_argument("--every"', 'parser.add_argument("--width", type=int)\nparser.add_argument("--every"'
).replace(
    "nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)",
    "nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, options.width), nn.Linear(options.width, 2)",
)
"""As `TRAIN`, with a state of about ``12 * width**2`` bytes."""


def plain_sha(folder: Path) -> Callable[..., str]:
    """Train `WIDE` in a plain process; return the sha256 of its parameters."""
    script = folder / "wide.py"
    script.write_text(WIDE)

    def train(*arguments: object) -> str:
        out = subprocess.check_output([sys.executable, str(script), *map(str, arguments)], text=True)
        return out.split("sha ")[1].strip()

    return train


class Watched:
    """A command that runs, and what it has said so far on stderr: with ``--json``, all but its result."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._lines: list[str] = []
        self._seen = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    def until(self, pattern: str, *, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait for the next line that matches, behind the one that was waited for last; return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = not self._reader.is_alive()
            while self._seen < len(self._lines):
                self._seen += 1
                if re.search(pattern, self._lines[self._seen - 1]):
                    return self._lines[self._seen - 1]
            assert not ended, f"it ended without {pattern!r}: {self.text}"
            time.sleep(0.02)
        raise AssertionError(f"there was no {pattern!r}: {self.text}")

    @property
    def text(self) -> str:
        """All that it has said on stderr."""
        return "".join(self._lines)

    def end(self, *, seconds: float = PATIENCE_SECONDS) -> Ended:
        """Wait for its end."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        status = self.process.wait(seconds)
        self._reader.join()
        return Ended(status, out, self.text)
