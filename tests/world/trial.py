"""Tries whether anything notices that protections are switched off: fresh worlds for a while, then tests."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from .mutation import Mutant, install

NUM_PROCESSES = int(os.environ.get("MUTANT_PROCESSES", os.cpu_count() or 1))
SECONDS = float(os.environ.get("MUTANT_SECONDS", "60"))
NOTICED = 3
"""The exit status of a process in which something was noticed."""


def attempt(mutants: Sequence[Mutant], tests: Sequence[str], *, seconds: float) -> int:
    """Run worlds of the mutated product for ``seconds`` of one core, then ``tests``; print what notices."""
    install(*mutants)
    from .campaign import live
    from .drawing import draw

    begun, seed = time.process_time(), 0
    while (taken := time.process_time() - begun) < seconds:
        _, broken = live(draw(seed))
        if broken:
            taken = time.process_time() - begun
            print(f"seed {seed}, after {taken:.0f} s: {broken[0]}".replace("\n", " ")[:200])
            return NOTICED
        seed += 1
    gc.collect()  # what worlds left: ended within pytest's rewriting of a test, it makes Python fail (SystemError)
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]) if tests else pytest.ExitCode.OK
    if status == pytest.ExitCode.TESTS_FAILED:
        print(f"not noticed by {seed} worlds in {taken:.0f} s, but by {' or '.join(tests)}")
        return NOTICED
    could_not = "" if status == pytest.ExitCode.OK else f", and the tests could not be run: exit status {int(status)}"
    print(f"not noticed by {seed} worlds in {taken:.0f} s{could_not}")
    return 0


def chosen(variable: str, names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that the environment's ``variable`` lists, by semicolons; all if it lists none.

    Exits with a message if one is unknown.
    """
    wanted = [name for text in os.environ.get(variable, "").split(";") if (name := text.strip())]
    if unknown := [name for name in wanted if name not in names]:
        sys.exit(f"{variable}: there is none with the name {'; '.join(unknown)}")
    return [name for name in names if not wanted or name in wanted]


def attempt_all(module: str, names: Sequence[str], *, starred: Sequence[str] = ()) -> list[str]:
    """Run ``python -m module --try name`` for each of ``names``; print a table; return those that nothing noticed."""

    def attempt_in_process(name: str) -> bool:
        command = [sys.executable, "-m", module, "--try", name]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = (done.stdout or done.stderr).strip().splitlines()
        print(f"| {name}{' *' if name in starred else ''} | {lines[-1] if lines else ''} |", flush=True)
        return done.returncode == NOTICED

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        found = list(pool.map(attempt_in_process, names))
    missed = [name for name, is_found in zip(names, found, strict=True) if not is_found]
    print(f"{len(names) - len(missed)} of {len(names)} were noticed; missed: {', '.join(missed) or 'none'}")
    return missed
