"""The same benches from two checkouts, in turns within one run: this one as a ratio to another one.

    python bench/compare.py [/path/to/other/checkout] [--turns 3] [--only recovery steady]

Without a path, the other one is the reference, a fixed earlier commit, which is checked out and installed below
``build/`` first. It moves forward only to a faster one.

Each checkout runs its own benches with its own `.venv`, but `startup.py`, which both run from here. A bench prints a
number for each of its targets; the ratio of the medians is that number here to there, for the targets that both have.
Lower is better for all of them. Ratios of wall-clock time count on a quiet machine alone, so each table says how much
else the machine had to do.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from report import print_table

HERE = Path(__file__).resolve().parent.parent
REFERENCE = "d330e632"
BENCHES = {
    "startup": ("startup.py", ["--quick"]),
    "recovery": ("recovery.py", ["--quick", "--only", "workers", "hosts", "run"]),
    "rescale": ("rescale.py", ["--quick", "--millions", "1"]),
    "rescale-100": ("rescale.py", ["--quick", "--millions", "100"]),
    "steady": ("steady.py", ["--quick", "--workers", "2"]),
    "pool": ("pool.py", ["--quick"]),
}
TARGET = re.compile(r"^  (?:ok|MISSED) +(.*): (-?[0-9.]+)[^,]*, at most ", re.MULTILINE)


def reference() -> Path:
    """Check the reference out, and install it, unless that was done before."""
    checkout = HERE / "build" / f"reference-{REFERENCE}"
    if not checkout.exists():
        subprocess.run(["git", "clone", "--quiet", HERE, checkout], check=True)
    subprocess.run(["git", "-C", checkout, "checkout", "--quiet", REFERENCE], check=True)
    subprocess.run(["make", "-C", checkout, "install"], check=True, stdout=sys.stderr)
    return checkout


def targets(checkout: Path, bench: str) -> Mapping[str, float]:
    """Run a bench of ``checkout``; return what it measured, by the names of its targets."""
    script, options = BENCHES[bench]
    where = HERE if bench == "startup" else checkout
    command = [str(checkout / ".venv/bin/python"), str(where / "bench" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout)
    found = {what: float(number) for what, number in TARGET.findall(done.stdout)}
    if not found:
        sys.exit(f"{' '.join(command)} measured nothing:\n{done.stdout}{done.stderr}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "other", type=Path, nargs="?", help="a checkout with an installed .venv; without it, the reference"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), default=list(BENCHES))
    args = parser.parse_args()
    other = args.other.resolve() if args.other else reference()
    for bench in args.only:
        compare(bench, other, turns=args.turns)


def compare(bench: str, other: Path, *, turns: int) -> None:
    """Run one bench in turns, and print the table."""
    load = os.getloadavg()[0]
    measured: dict[Path, list[Mapping[str, float]]] = {HERE: [], other: []}
    for turn in range(turns):
        for checkout in sorted(measured, reverse=bool(turn % 2)):
            measured[checkout].append(targets(checkout, bench))
    ours, theirs = (_medians(runs) for runs in measured.values())
    rows = [
        (what, f"{theirs[what]:.3f}", f"{ours[what]:.3f}", f"{ours[what] / theirs[what]:.2f}" if theirs[what] else "-")
        for what in ours
        if what in theirs
    ]
    print_table(
        f"{bench}: medians of {turns} turns; the load of the machine was {load:.1f} before",
        ("", "there", "here", "ratio"),
        rows,
    )
    if alone := sorted(ours.keys() ^ theirs.keys()):
        print(f"  only one of both has: {', '.join(alone)}", flush=True)


def _medians(runs: list[Mapping[str, float]]) -> dict[str, float]:
    return {what: statistics.median(run[what] for run in runs) for what in runs[0] if all(what in run for run in runs)}


if __name__ == "__main__":
    main()
