"""What a training notes and a bench reads: which iteration was committed when, and by which members."""

import time
from pathlib import Path
from typing import NamedTuple


class Stamp(NamedTuple):
    """An iteration that was committed, at a time on the monotonic clock, which is the same in all processes."""

    iteration: int
    time: float
    membership: str
    """What tells the members from those before and after."""
    workers: int


class StampPad:
    """A training's side. Several processes may append to one file."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process

    def stamp(self, iteration: int, *, membership: object, workers: int) -> None:
        """Note that ``iteration`` was committed just now."""
        self._file.write(f"{iteration} {time.monotonic()} {membership} {workers}\n")


class Stamps:
    """A bench's side: all that has been noted in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._offset = 0
        self._seen: list[Stamp] = []

    def read(self) -> list[Stamp]:
        """Return all stamps so far; only what is new is read."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._seen += [_parse(line) for line in whole.decode().splitlines()]
        return self._seen


def _parse(line: str) -> Stamp:
    iteration, at, membership, workers = line.split()
    return Stamp(int(iteration), float(at), membership, int(workers))
