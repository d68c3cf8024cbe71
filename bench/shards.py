"""How well N workers share V shards: iteration time over N = 1..8, with emulated accelerators, against the ideal.

    python bench/shards.py [--quick | --tiny]

One run for each V visits all N by a plan. An iteration takes as long as the worker with most shards: the ideal is
ceil(V / N) / V of one worker's time. What is above it is the exchange and all else that an iteration costs.
"""

import itertools
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import argument_parser, print_table
from stamps import Stamps

HERE = Path(__file__).resolve().parent
SIZES = range(1, 9)
SHARDS = (8, 16, 24)
BATCH_SIZE = 192
SKIPPED = 3  # iterations after a change: the first one has the change in it


def iteration_times(num_shards: int, *, iterations: int, sample_seconds: float) -> dict[int, float]:
    """The median time of an iteration, in seconds, for each number of workers."""
    sizes = [size for size in SIZES if size <= num_shards]
    plan = ",".join(f"{number * iterations}:{size}" for number, size in enumerate(sizes))
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder) / "stamps"
        options = ["--plan", plan, "--home", folder, "--json"]
        args = {
            "batch-size": BATCH_SIZE,
            "num-shards": num_shards,
            "iterations": iterations * len(sizes),
            "sample-seconds": sample_seconds,
            "stamps": stamps,
        }
        script_args = [part for name, value in args.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "resile", "run", str(HERE / "emulated.py"), *options, "--", *script_args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"the run could not be measured: {done.stderr}")
        times = [stamp.time for stamp in Stamps(stamps).read()]
    medians = {}
    for number, size in enumerate(sizes):
        own = times[number * iterations + SKIPPED : (number + 1) * iterations]
        medians[size] = statistics.median(later - earlier for earlier, later in itertools.pairwise(own))
    return medians


def main() -> None:
    length = argument_parser(__doc__).parse_args().length
    iterations, sample_seconds = length.pick(full=(50, 0.001), quick=(20, 0.0005), tiny=(6, 0.0001))
    rows = []
    for num_shards in length.pick(full=SHARDS, quick=SHARDS, tiny=(2,)):
        medians = iteration_times(num_shards, iterations=iterations, sample_seconds=sample_seconds)
        for size, seconds in medians.items():
            ideal = medians[1] * math.ceil(num_shards / size) / num_shards
            cells = (
                f"{seconds * 1e3:.1f}",
                f"{ideal * 1e3:.1f}",
                f"{seconds / ideal:.2f}",
                f"{medians[1] / seconds:.2f}",
            )
            rows.append((f"V = {num_shards}, N = {size}", *cells))
    header = ("shards, workers", "iteration, ms", "ideal, ms", "ratio", "speed-up")
    print_table(
        f"A batch of {BATCH_SIZE} on emulated accelerators ({sample_seconds * 1e3:g} ms a sample)", header, rows
    )


if __name__ == "__main__":
    main()
