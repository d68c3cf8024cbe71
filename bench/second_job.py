"""How soon the workers of a script with large imports train: in a repeated job, and in a job that grows.

    python bench/second_job.py [--quick | --tiny] [--only jobs|growths] [--imports scikit-learn transformers]

Jobs: a pool of one host runs jobs of two workers one after the other, and stops each once it trains. Every second job
has the same code and variables as the one before and is forked from its template; the others have a variable of their
own and are not. The time runs from the submission to the first committed iteration, after the package was uploaded.

Growths: two jobs share four slots, and the priority of one goes up and down, as in pool.py; by what they import.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import arguments, pool_up
from pool import Change, flip
from report import Target, argument_parser, conclude, print_table
from stamps import Stamps

from resile.client import AsyncClient
from resile.package import pack
from resile.pool.services import PoolOptions
from resile_shared.messages.jobs import JobSpec

HERE = Path(__file__).resolve().parent
SCRIPTS = {"scikit-learn": HERE / "rescaled_sklearn.py", "transformers": HERE / "rescaled_transformers.py"}
NUM_WORKERS, NUM_SLOTS = 2, 4
WARM_SECONDS = 1.5
GROWTH_MS = 600
POLL_SECONDS = 0.01
PATIENCE_SECONDS = 120.0
SETTLE_ITERATIONS = 100
"""The number of iterations after which a job is stopped."""


async def first_iteration(
    client: AsyncClient, script: Path, package: str, stamps: Stamps, *, env: dict[str, str]
) -> float:
    """Return the seconds from a submission to the first iteration; the job is stopped a little later."""
    spec = JobSpec(
        name=script.stem,
        package=package,
        script=script.name,
        args=arguments(stamps.path),
        max_workers=NUM_WORKERS,
        env=env,
    )
    begun = time.monotonic()
    job = await client.submit(spec)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if len(stamps.read()) > SETTLE_ITERATIONS:
                break
        await client.stop(job)
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not any(slot.job for host in await client.hosts() for slot in host.slots):
                break
    return stamps.read()[0].time - begun


async def measure_jobs(script: Path, turns: int) -> dict[str, list[float]]:
    """Return the seconds to the first iteration, of first jobs and of second ones."""
    found: dict[str, list[float]] = {"first job with its variables": [], "second job": []}
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as name:
        folder = Path(name)
        async with pool_up(folder / "home", PoolOptions(hosts=1, slots=NUM_SLOTS)) as client:
            package = await client.upload((await asyncio.to_thread(pack, script)).content)
            for turn in range(turns):
                for number, times in enumerate(found.values()):
                    stamps = Stamps(folder / f"{turn}-{number}.stamps")
                    times.append(await first_iteration(client, script, package, stamps, env={"TURN": str(turn)}))
    return found


async def measure_growths(script: Path, num_changes: int) -> list[Change]:
    """Return how long growths took."""
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as name:
        folder = Path(name)
        async with pool_up(folder / "home", PoolOptions(hosts=1, slots=NUM_SLOTS)) as client:
            commands = await flip(client, folder, num_changes, script=script)
        return [command.changes()[1] for command in commands]


def print_growths(imports: str, growths: Sequence[Change]) -> Target:
    effects = [growth.effect * 1e3 for growth in growths]
    before = statistics.median(growth.iteration_before for growth in growths) * 1e3
    row = (str(len(growths)), f"{before:.1f}", f"{statistics.median(effects):.0f}", f"{max(effects):.0f}")
    print_table(
        f"A job that imports {imports} grows on {NUM_SLOTS} slots, by priority",
        ("growths", "iteration before ms", "median ms", "max ms"),
        [row],
    )
    late = statistics.median((growth.effect - growth.iteration_before) * 1e3 for growth in growths)
    return Target(f"{imports}: command to effect of a growth less one iteration", late, GROWTH_MS, "ms")


def print_jobs(found: Mapping[str, Sequence[float]]) -> Target:
    rows = [(what, f"{statistics.median(t):.2f}", f"{min(t):.2f}", f"{max(t):.2f}") for what, t in found.items()]
    print_table("From the submission to the first iteration", ("", "median s", "min s", "max s"), rows)
    return Target("second job", statistics.median(found["second job"]), WARM_SECONDS, "s")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", choices=["jobs", "growths"])
    parser.add_argument("--imports", nargs="+", choices=[*SCRIPTS], default=[*SCRIPTS], help="of the jobs that grow")
    args = parser.parse_args()
    length = args.length
    targets = []
    if args.only != "growths":
        turns = length.pick(full=10, quick=4, tiny=1)
        targets.append(print_jobs(asyncio.run(measure_jobs(SCRIPTS["scikit-learn"], turns))))
    if args.only != "jobs":
        num_changes = length.pick(full=20, quick=6, tiny=1)
        found = {name: asyncio.run(measure_growths(SCRIPTS[name], num_changes)) for name in args.imports}
        targets += [print_growths(name, growths) for name, growths in found.items()]
    conclude(targets, length)


if __name__ == "__main__":
    main()
