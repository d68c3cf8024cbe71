"""How many jobs are simulated in an hour: the scheduler's core in simulated time, under each policy.

    python bench/simulate.py [--quick | --tiny] [--slots 40 400] [--json]

The loads are those of `resile simulate`: 0.5, 1.5 and 0.8 of what the slots can do, the last one in bursts; three kinds
of jobs. Seconds are processor time: all of it is one thread.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from report import Target, argument_parser, conclude, print_table

from resile_scheduler.simulation.simulate import Settings, simulate
from resile_scheduler.simulation.sources import LOADS, read_trace
from resile_shared.policies import PolicyName

PER_HOUR = 100_000


@dataclass(frozen=True)
class Measured:
    """One simulation."""

    slots: int
    load: str
    policy: str
    jobs: int
    seconds: float

    @property
    def jobs_per_hour(self) -> float:
        """As many could be simulated in an hour."""
        return self.jobs / self.seconds * 3600.0


def measure(slots: int, hours: float) -> Iterator[Measured]:
    """Simulate each load under each policy."""
    for load in LOADS:
        workload = read_trace(load, num_slots=slots, hours=hours)
        for policy in PolicyName:
            begun = time.process_time()
            simulate(workload, Settings(policy))
            yield Measured(slots, load, policy, len(workload.submissions), time.process_time() - begun)


def name(found: Measured) -> str:
    """Return what was simulated."""
    return f"{found.slots}, {found.load}, {found.policy}"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--slots", type=int, nargs="+", help="the sizes of the pool")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    options = parser.parse_args()
    slots = options.slots or options.length.pick(full=[40, 400], quick=[40], tiny=[4])
    hours = options.length.pick(full=8.0, quick=2.0, tiny=0.1)
    measured = [found for num in slots for found in measure(num, hours)]
    if options.json:
        print(json.dumps([asdict(found) for found in measured]))
        return
    rows = [(name(found), str(found.jobs), f"{found.seconds:.1f}", f"{found.jobs_per_hour:,.0f}") for found in measured]
    print_table("Simulated jobs", ("slots, load, policy", "jobs", "seconds", "jobs an hour"), rows)
    fewest = min(slots)
    per_load = {
        load: sum(found.seconds for found in chosen) / sum(found.jobs for found in chosen)
        for load in LOADS
        if (chosen := [found for found in measured if found.load == load and found.slots == fewest])
    }
    targets = [
        Target(f"{fewest} slots, load {load}: seconds for {PER_HOUR:,} jobs", seconds * PER_HOUR, 3600.0, "s")
        for load, seconds in per_load.items()
    ]
    conclude(targets, options.length)


if __name__ == "__main__":
    main()
