"""The same benches from two checkouts, in turns within one run: this one as a ratio to another one.

    python bench/compare.py /path/to/other/checkout [--turns 3] [--only recovery steady]

Each checkout runs its own benches with its own `.venv`, but `startup.py`, which both run from here. A bench prints a
number for each of its targets; the ratio of the medians is that number here to there. Lower is better for all of them.
"""

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

from report import print_table

HERE = Path(__file__).resolve().parent.parent
BENCHES = {
    "startup": ("startup.py", ["--quick"]),
    "recovery": ("recovery.py", ["--quick", "--only", "workers", "hosts", "run"]),
    "rescale": ("rescale.py", ["--quick", "--millions", "1"]),
    "steady": ("steady.py", ["--quick", "--workers", "2"]),
    "pool": ("pool.py", ["--quick"]),
}
TARGET = re.compile(r"^  (?:ok|MISSED) +(.*): ([0-9.]+)[^,]*, at most ", re.MULTILINE)


def targets(checkout: Path, bench: str) -> list[tuple[str, float]]:
    """Run a bench of ``checkout``; return what it measured."""
    script, options = BENCHES[bench]
    where = HERE if bench == "startup" else checkout
    command = [str(checkout / ".venv/bin/python"), str(where / "bench" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout)
    found = [(what, float(number)) for what, number in TARGET.findall(done.stdout)]
    if not found:
        sys.exit(f"{' '.join(command)} measured nothing:\n{done.stdout}{done.stderr}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout with an installed .venv")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), default=list(BENCHES))
    args = parser.parse_args()
    for bench in args.only:
        measured: dict[Path, list[list[tuple[str, float]]]] = {HERE: [], args.other.resolve(): []}
        for turn in range(args.turns):
            for checkout in sorted(measured, reverse=bool(turn % 2)):
                measured[checkout].append(targets(checkout, bench))
        rows = []
        for index, (what, _) in enumerate(measured[HERE][0]):
            ours, theirs = (statistics.median(run[index][1] for run in runs) for runs in measured.values())
            rows.append((what, f"{theirs:.3f}", f"{ours:.3f}", f"{ours / theirs:.2f}" if theirs else "-"))
        print_table(f"{bench}: medians of {args.turns} turns", ("", "there", "here", "ratio"), rows)


if __name__ == "__main__":
    main()
