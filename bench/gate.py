"""Turns: a bench lets several trainings run a block of iterations each, one training after the other.

All of them live side by side, and a worker that does not have its turn is blocked in a read. So blocks that are
compared run within a second of each other, and what else the machine does hits all of them alike.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class Gate:
    """The bench's side: hands out turns to named trainings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._workers: dict[str, dict[int, Any]] = {}

    def __enter__(self) -> "Gate":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for workers in self._workers.values():
            for stream in workers.values():
                stream.close()

    def admit(self, sizes: Mapping[str, int], *, seconds: float, broken: Callable[[], bool]) -> None:
        """Wait until all workers of all trainings are there. Raises RuntimeError when one is not going to come."""
        deadline = time.monotonic() + seconds
        self._listener.settimeout(1.0)
        while any(len(self._workers.get(name, ())) < size for name, size in sizes.items()):
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if broken() or time.monotonic() > deadline:
                    raise RuntimeError("a training that should be measured did not start: see above") from None
                continue
            connection.settimeout(seconds)
            stream = connection.makefile("rw")
            who = json.loads(stream.readline())
            self._workers.setdefault(who["name"], {})[who["rank"]] = stream

    def turn(self, name: str, iterations: int) -> list[dict[str, list[float]]]:
        """Let one training do so many iterations; return what each worker measured, by rank.

        That is seconds for each iteration and its noted parts, and under "cpu" the processor time of the whole turn.
        """
        workers = self._workers[name]
        for stream in workers.values():
            stream.write(f"{iterations}\n")
            stream.flush()
        return [json.loads(workers[rank].readline()) for rank in sorted(workers)]


class Turnstile:
    """A worker's side: `pass_` before each iteration, `note` what a part of it took."""

    def __init__(self, path: str, name: str, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw")
        self._stream.write(json.dumps({"name": name, "rank": rank}) + "\n")
        self._stream.flush()
        self._left = 0
        self._measured: dict[str, list[float]] = {}
        self._begun = 0.0
        self._cpu_begun = 0.0
        self._parts: dict[str, float] = {}

    def pass_(self) -> bool:
        """End one iteration and begin the next, when it is this training's turn. False when there is none any more."""
        now = time.perf_counter()
        if self._begun:
            self.note("iteration", now - self._begun)
            for part, seconds in self._parts.items():
                self._measured.setdefault(part, []).append(seconds)
            self._parts.clear()
            self._left -= 1
        if not self._left:
            if self._begun:
                self._measured["cpu"] = [time.process_time() - self._cpu_begun]
                self._stream.write(json.dumps(self._measured) + "\n")
                self._stream.flush()
                self._measured.clear()
            line = self._stream.readline()
            if not line:
                return False
            self._left = int(line)
            self._cpu_begun = time.process_time()
            now = time.perf_counter()
        self._begun = now
        return True

    def note(self, part: str, seconds: float) -> None:
        """Add to what ``part`` took in this iteration."""
        self._parts[part] = self._parts.get(part, 0.0) + seconds
