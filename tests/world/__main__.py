"""``python -m tests.world``: runs worlds from fresh seeds, or tells the story of one.

WORLD_SECONDS=600   how long (60)
SEED=17             one world alone: its shortest failing plan, and its story
"""

import os
import random
import sys

from .campaign import live, run, shortest, tell
from .drawing import draw


def main() -> int:
    if seed := os.environ.get("SEED"):
        plan = draw(int(seed))
        if live(plan)[1]:
            plan = shortest(plan)
        print(tell(plan))
        return 0
    first = random.SystemRandom().randrange(1_000_000) * 1000
    seconds = float(os.environ.get("WORLD_SECONDS", "60"))
    print(f"worlds from seed {first} on, for {seconds:g} seconds", flush=True)
    totals = run(iter(range(first, first + 1_000_000)), seconds=seconds)
    print(totals)
    for number in list(totals.failed)[:3]:
        print(tell(shortest(draw(number))))
    print(f"{len(totals.failed)} worlds broke a promise: {sorted(totals.failed)}")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same in every run
        os.execve(sys.executable, [sys.executable, "-m", "tests.world"], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
