"""A second scheduler beside the one of a pool: the first is frozen meanwhile, so that the second takes the lease.

When the first one runs again it finds that it is no longer the leader. Then the second ends, and the pool's own leads
again.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from resile_shared.errors import UsageError
from resile_shared.processes import dying_with_parent

from ..pool.namespaces import Namespaces

READY_SECONDS = 30.0
CONTEST_SECONDS = 2.0
"""Seconds for which both schedulers run once the first is no longer frozen."""


@contextlib.contextmanager
def second_scheduler(first: int, home: Path) -> Iterator[None]:
    """Run a scheduler with the arguments of the process ``first`` while the block runs, and for a while after it."""
    words = Path(f"/proc/{first}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    try:
        prefix = Namespaces.of(home).enter("scheduler")
    except UsageError:
        prefix = ()
    words.remove("--supervised=true")  # the pool ends its own by the end of stdin; this one ends at a signal
    with tempfile.TemporaryDirectory(prefix="resile-chaos-") as folder:
        health = Path(folder, "health")
        words[words.index("--health-file") + 1] = str(health)
        with Path(home, "logs", "second-scheduler.log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("RESILE_")},
                preexec_fn=dying_with_parent(),
            )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not health.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UsageError("duplicate scheduler: the second scheduler did not start")
                time.sleep(0.05)
            yield
            time.sleep(CONTEST_SECONDS)
        finally:
            process.terminate()
            process.wait()
