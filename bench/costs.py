"""What an iteration, a change, a loss and a start do, in counts that do not depend on the load of the machine.

    python bench/costs.py [--quick | --tiny] [--check] [--mutants message disk copy]

A real run of four workers trains a small MLP (`costed.py`). By a plan it shrinks to three workers and grows back; it
saves a checkpoint; and a worker of it is killed. Each worker counts what it does. The cost of an event is what all
workers together do in the iterations around it, less what as many undisturbed iterations do. Beside it, a plain process
counts the calls of Python functions of an iteration: what Resile and PyTorch do around the arithmetic. And on a pool,
the messages are counted that the bus stores because of a change (`costed_pool.py`). With ``--mutants`` these two
are left out.

`costs.json` has the counts that are allowed. ``--check`` compares with it, and fails if one has grown: a commit that
raises it says why. Counts in the lower part of the table depend on how threads take turns, and are only printed.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from costed_pool import STORED, pool_costs
from report import argument_parser, print_table

from resile.local.events import Printed, RunEvent
from resile.local.run import LocalRun
from resile.local.settings import RunSettings
from resile_scheduler.policies.plan import PlanStep

HERE = Path(__file__).resolve().parent
ALLOWED = HERE / "costs.json"
WORKERS = 4
SHRINK, GROW, SAVE, KILL, END = 34, 50, 66, 75, 95
"""The iterations of the events. In none from 33 to 95, but 48 and 64, do all workers compare the first shard."""
BEFORE, AFTER, AFTER_KILL = 1, 7, 2
"""The iterations around an event that belong to it; of a kill those before the next worker joins."""
STEADY = {WORKERS: range(58, 63), WORKERS - 1: range(42, 47)}
"""Undisturbed iterations, by the number of workers."""
OF_WORKERS = (
    "shards computed",
    "rounds",
    "frames",
    "frame bytes",
    "copied bytes",
    "segments made",
    "segments mapped",
    "state sent",
    "messages to agents",
    "messages to peers",
    "waits for the disk",
)
COMPARED = (*OF_WORKERS, "python calls", *STORED.values())
PRINTED = ("sleeps", "system calls", "processor ms")
OF_A_KILL = ("rounds", "copied bytes", "segments made", "state sent")
"""What a kill costs wherever in an iteration it comes."""
HEADER_BYTES = 20_000
"""By how much frames may differ: headers have numbers in them, as text."""
PYTHON_CALLS = 0.05
"""By which part calls may be more, in another version of Python or torch."""
LATE = {"frames": 1.2, "frame bytes": 1.2, "messages to agents": 0.25, "messages to peers": 0.25}
LATE |= dict.fromkeys(STORED.values(), 0.5)
"""By which part an event may cost more: on a busy machine, members may agree a round later to share memory, and workers
start one after the other.
"""
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 180.0
Counts = Mapping[str, float]


@dataclass(frozen=True)
class Noted:
    """What one worker noted."""

    first: int
    """The first iteration of this worker."""
    totals: Sequence[Counter[str]]
    """For each of its iterations, all that it had done by then."""

    def during(self, iteration: int) -> Counter[str]:
        """What it did from the end of the iteration before to the end of ``iteration``."""
        number = iteration - self.first
        if not 0 <= number < len(self.totals):
            return Counter()
        before = self.totals[number - 1] if number else Counter()
        return Counter({name: count - before[name] for name, count in self.totals[number].items()})


def read(file: Path) -> Noted:
    """Read the notes of one worker. Iterations that were repeated count with those that follow."""
    text = file.read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    by_number = {line["iteration"]: Counter(line["counts"]) for line in lines}
    return Noted(min(by_number, default=0), list(by_number.values()))


class CountedRun:
    """A run, with a kill."""

    def __init__(self, folder: Path, *, mutants: Sequence[str] = ()) -> None:
        self._notes = folder / "notes"
        self._notes.mkdir()
        options = ("--notes", self._notes, "--iterations", END, "--checkpoint-at", SAVE, "--mutants", *mutants)
        args = map(str, options)
        plan = (PlanStep(0, WORKERS), PlanStep(SHRINK, WORKERS - 1), PlanStep(GROW, WORKERS))
        self._run = LocalRun(RunSettings(HERE / "costed.py", args=tuple(args), plan=plan, home=folder / "home"))

    async def counts(self) -> list[Noted]:
        """Run it; return what each worker noted."""
        run = asyncio.create_task(self._run.run(_show))
        killing = asyncio.create_task(self._kill())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                result = await run
        finally:
            killing.cancel()
            run.cancel()
        if result.outcome.state != "completed":
            sys.exit(f"the run ended as {result.outcome}")
        return [read(file) for file in self._notes.iterdir()]

    async def _kill(self) -> None:
        """Kill the newest worker once it has trained the iteration before."""
        while True:
            for file in self._notes.iterdir():
                noted = read(file)
                if noted.first == GROW and noted.first + len(noted.totals) >= KILL:
                    os.kill(int(file.name), signal.SIGKILL)
                    return
            await asyncio.sleep(POLL_SECONDS)


def _show(event: RunEvent) -> None:
    if isinstance(event, Printed):
        print(event.line, file=sys.stderr)


def costs(workers: Sequence[Noted]) -> dict[str, Counts]:
    """By event, what it costs: counts of all workers together."""

    def during(iteration: int) -> Counter[str]:
        return sum((worker.during(iteration) for worker in workers), Counter())

    steady = {size: _median([during(iteration) for iteration in iterations]) for size, iterations in STEADY.items()}

    def of(event: int, size: int, *, after: int = AFTER) -> Counts:
        window = range(event - BEFORE, event + after)
        total: Counter[str] = sum(map(during, window), Counter())
        return {name: total[name] - len(window) * steady[size][name] for name in (*OF_WORKERS, *PRINTED)}

    killed = min(worker.first + len(worker.totals) for worker in workers if worker.first == GROW)
    return {
        "an iteration of 4 workers": steady[WORKERS],
        "an iteration of 3 workers": steady[WORKERS - 1],
        "a start": during(0),
        "a shrink": of(SHRINK, WORKERS - 1),
        "a grow": of(GROW, WORKERS),
        "a checkpoint": of(SAVE, WORKERS),
        "a kill": of(killed, WORKERS - 1, after=AFTER_KILL),
    }


def _median(counts: Sequence[Counter[str]]) -> Counter[str]:
    return Counter({name: int(statistics.median(each[name] for each in counts)) for name in (*OF_WORKERS, *PRINTED)})


def python_calls() -> int:
    """Calls of Python functions in an iteration of one plain process."""
    command = [sys.executable, HERE / "costed.py", "--iterations", "42"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def grown(found: Mapping[str, Counts], allowed: Mapping[str, Counts]) -> list[str]:
    """Return a line for each count that is larger than is allowed."""
    return [
        f"{event}: {name} {found[event][name]:g}, at most {limit:g} are allowed"
        for event, limits in allowed.items()
        if event in found
        for name, limit in limits.items()
        if found[event][name] > limit + _slack(event, name, limit)
    ]


def _slack(event: str, name: str, limit: float) -> float:
    if name == "python calls":
        return limit * PYTHON_CALLS
    late = 0.0 if event.startswith("an iteration") else abs(limit) * LATE.get(name, 0.0)
    return late + (HEADER_BYTES if name == "frame bytes" else 0)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--check", action="store_true", help=f"fail if a count is larger than {ALLOWED.name} says")
    parser.add_argument("--write", action="store_true", help=f"write the counts to {ALLOWED.name}")
    parser.add_argument("--mutants", nargs="*", choices=["message", "disk", "copy"], default=(), help="do too much")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as folder:
        found = costs(asyncio.run(CountedRun(Path(folder), mutants=args.mutants).counts()))
        on_pool = {} if args.mutants else asyncio.run(pool_costs(Path(folder)))
    rows = [(name, *(f"{counts[name]:g}" for counts in found.values())) for name in (*OF_WORKERS, *PRINTED)]
    print_table("What all workers do together", ("", *found), rows)
    if not args.mutants:
        rows = [(name, *(f"{counts[name]:g}" for counts in on_pool.values())) for name in STORED.values()]
        print_table("What the bus stores", ("", *on_pool), rows)
        calls = python_calls()
        print(f"\nCalls of Python functions in an iteration of one plain process: {calls}")
        found |= {**on_pool, "an iteration of one process": {"python calls": calls}}
    if args.write:
        kept = {
            event: {name: counts[name] for name in (OF_A_KILL if event == "a kill" else COMPARED) if name in counts}
            for event, counts in found.items()
        }
        ALLOWED.write_text(json.dumps(kept, indent=1) + "\n")
    if args.check and (lines := grown(found, json.loads(ALLOWED.read_text()))):
        sys.exit("\n".join(["counts have grown: find out why, or raise them in a commit that says why", *lines]))


if __name__ == "__main__":
    main()
