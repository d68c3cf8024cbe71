"""Runs the real command on real scripts."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass
class Outcome:
    status: int
    result: dict[str, Any]
    errors: str

    @property
    def sha(self) -> str:
        assert self.status == 0, self.errors
        sha = self.result["params_sha256"]
        assert isinstance(sha, str)
        return sha

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(first iteration, workers) of every generation."""
        return [(item["iteration"], item["workers"]) for item in self.result["history"] if item["kind"] == "allocation"]

    def assert_every_sample_once(self, *, epochs: int) -> None:
        ledger = self.result["ledger"]["epochs"]
        assert [epoch["epoch"] for epoch in ledger] == list(range(epochs))
        for epoch in ledger:
            assert (epoch["once"], epoch["more"], epoch["never"]) == (epoch["samples"], 0, 0)


def command(script: str | Path, *options: str, home: Path, args: tuple[str, ...] = ()) -> list[str]:
    """The command line of `resile run`."""
    path = script if isinstance(script, Path) else SCRIPTS / script
    return [
        sys.executable,
        "-m",
        "resile",
        "run",
        str(path),
        "--home",
        str(home),
        "--json",
        *options,
        *(("--", *args) if args else ()),
    ]


def run(script: str | Path, *options: str, home: Path, args: tuple[str, ...] = (), seconds: float = 240) -> Outcome:
    """Run a script to its end."""
    done = subprocess.run(
        command(script, *options, home=home, args=args), capture_output=True, text=True, timeout=seconds, check=False
    )
    return Outcome(done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr)


def run_until(script: str | Path, pattern: str, *options: str, home: Path, args: tuple[str, ...] = ()) -> None:
    """Start a run and kill -9 its launcher once a line of its stderr matches ``pattern``."""
    process = subprocess.Popen(
        command(script, *options, home=home, args=args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if re.search(pattern, line):
                return
        raise AssertionError(f"the run ended without a line that matches {pattern!r}")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def run_attacked(
    script: str | Path,
    *options: str,
    home: Path,
    attack: Callable[[int, Iterable[str]], list[str]],
    args: tuple[str, ...] = (),
) -> tuple[Outcome, list[str]]:
    """Run a script while ``attack(launcher, lines of stderr)`` strikes it; return the outcome and what that returns."""
    process = subprocess.Popen(
        command(script, *options, home=home, args=args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        struck = attack(process.pid, process.stderr)
        out = process.stdout.read()
        return Outcome(process.wait(60), json.loads(out) if out.strip() else {}, ""), struck
    finally:
        process.kill()
        process.communicate()


def plain(script: str | Path, *args: str, seconds: float = 240) -> str:
    """Run a script as `python script.py` and return the sha that it prints."""
    return sha_in(plain_output(script, *args, seconds=seconds))


def plain_output(script: str | Path, *args: str, seconds: float = 240) -> str:
    """Run a script as `python script.py` and return all that it prints."""
    path = script if isinstance(script, Path) else SCRIPTS / script
    command = [sys.executable, str(path), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    return done.stderr + done.stdout


def sha_in(output: str) -> str:
    """Return the sha that a plain run has printed."""
    found = re.search(r"params_sha256 ([0-9a-f]{64})", output)
    assert found, output
    return found.group(1)
