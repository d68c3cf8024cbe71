"""A run whose workers are struck three times, once they exchange as a test wants: killed, frozen, and killed."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .paced import Pace
from .running import Outcome, command
from .test_kills import workers

PATIENCE_SECONDS = 120


def run_struck(script: Path, folder: Path, *, leaves_at: int, are_linked: Callable[[Sequence[int]], bool]) -> Outcome:
    """Run ``script`` on 2 workers, then 3, then 2 from iteration ``leaves_at`` on.

    The strikes come when the run has three workers (again) and ``are_linked(pids)`` says that they exchange as they
    should.
    """
    pace = Pace(folder / "pace")
    process = subprocess.Popen(
        command(script, "--plan", f"0:2,3:3,{leaves_at}:2", home=folder / "home", args=("--pace", str(pace.file))),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    strikes = [(0, signal.SIGKILL), (-1, signal.SIGSTOP), (1, signal.SIGKILL)]
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if strikes and re.search("-> 3 workers", line):
                pids = workers(process.pid)
                _wait(lambda pids=pids: are_linked(pids))
                rank, strike = strikes.pop(0)
                os.kill(pids[rank], strike)
                if not strikes:
                    pace.fast_until(10**6)
        out = process.stdout.read()
        status = process.wait(PATIENCE_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert not strikes
    outcome = Outcome(status, json.loads(out) if out.strip() else {}, "".join(lines))
    assert outcome.sizes[-1][1] == 2
    return outcome


def _wait(are_linked: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not are_linked():
        assert time.monotonic() < deadline, "the workers do not exchange as they should"
        time.sleep(0.1)
