"""Workers that are forked from templates: as if each had imported everything itself, to the last bit."""

from pathlib import Path
from typing import Any

from .conftest import TRAIN

REMEMBERS = "import os, random\nimporter = os.getpid()\ndrawn = random.random()\n"
"""A library that knows which process has imported it, and draws a random number meanwhile."""
HEAD = """
import remembers
import os, random, signal
when = "here" if remembers.importer == os.getpid() else "before"
print("imported", when, remembers.drawn, random.random(), signal.getsignal(signal.SIGCHLD))
"""


def lines_of(resile: Any, library: str, *, home: str) -> tuple[set[tuple[str, ...]], str]:
    """Run the script; return what its workers printed about the import, and the final parameters' digest."""
    folder: Path = resile.folder / "library"
    folder.mkdir(exist_ok=True)
    (folder / "remembers.py").write_text(library)
    resile.script(HEAD + TRAIN)
    arguments = ("run", "train.py", "--plan", "0:2,5:4", "--json", "--home", resile.folder / home)
    ended = resile.run(*arguments, PYTHONPATH=str(folder))
    assert ended.status == 0, ended.err
    logs = list((resile.folder / home / "runs").glob("*/logs/worker-*.log"))
    assert len(logs) == 4
    told = {tuple(line.split()[1:]) for log in logs for line in log.read_text().splitlines() if "imported" in line}
    return told, ended.json["params_sha256"]


def test_workers_find_modules_numbers_and_signals_as_if_they_had_done_it(resile: Any, undisturbed: str) -> None:
    ((when, *drawn),), sha = lines_of(resile, REMEMBERS, home="warm")
    ((when_cold, *drawn_cold),), sha_cold = lines_of(resile, REMEMBERS + "kept = open(__file__)\n", home="cold")
    assert (when, when_cold) == ("before", "here"), "a library that leaves a file open is imported by each worker"
    assert drawn == drawn_cold
    assert sha == sha_cold == undisturbed
