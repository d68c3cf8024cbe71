"""Workers of real runs that are killed or frozen: the result is that of the undisturbed run, sample for sample."""

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from resile.pool.worker_processes import workers_below

from .running import SCRIPTS, plain, run_attacked

EPOCHS = 2


def workers(launcher: int) -> list[int]:
    """Process ids of the workers, in the order of their ranks."""
    found = sorted(workers_below(launcher, ""), key=lambda worker: worker.number)
    return [worker.pid for worker in found]


def attack(
    launcher: int, said: Iterable[str], strike: signal.Signals, times: int, *, done: Path | None = None
) -> list[str]:
    """Strike a worker, the lowest rank every other time, whenever three train; tell after which words it was done.

    ``done`` is made after the last strike.
    """
    after = []
    for line in said:
        whole = re.search(r"(-> 3 workers|iteration 0: 3 workers)", line)
        if len(after) < times and (
            whole or (after and "checkpoint saved" in line and "checkpoint" not in "".join(after))
        ):
            ranks = workers(launcher)
            os.kill(ranks[0] if len(after) % 2 == 0 else ranks[-1], strike)
            after.append(line)
            if done and len(after) == times:
                done.touch()
    return after


@pytest.mark.parametrize(("strike", "times"), [(signal.SIGKILL, 5), (signal.SIGSTOP, 2)])
def test_killed_and_frozen_workers_change_neither_bits_nor_ledger(
    tmp_path: Path, strike: signal.Signals, times: int
) -> None:
    text = (SCRIPTS / "everything.py").read_text().replace("checkpoint_every=20", "checkpoint_every=1")
    script = tmp_path / "everything.py"
    args = ("--epochs", str(EPOCHS), "--bf16")
    script.write_text(text)
    sha = plain(script, *args)
    script.write_text(text.replace("return self.x[index]", "__import__('time').sleep(0.003); return self.x[index]"))
    outcome, struck = run_attacked(
        script,
        "--workers",
        "3",
        home=tmp_path / "home",
        args=args,
        attack=lambda launcher, said: attack(launcher, said, strike, times),
    )
    assert len(struck) == times
    assert outcome.sha == sha
    outcome.assert_every_sample_once(epochs=EPOCHS)
