"""``python -m tests.soak``: a real pool runs short jobs for long; nothing that it uses may keep growing.

SOAK_MINUTES=30  how long

Rounds of jobs, among them one that fails and one that is stopped, follow each other. After each round, when all its
jobs are over, it is measured what the pool uses. The exit status is 1 if something grew beyond what is retained.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from resile.client import AsyncClient, find_server
from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import read_credentials
from resile_shared.messages.jobs import JobState

from ..system.paced import submit
from ..system.pools import UpPool, pool_up
from .growth import Growth, growth
from .sampling import SLACK, sample

HOSTS, SLOTS = 2, 2
KEPT_JOBS = 20
LONGEST_ROUND_SECONDS = 300.0
_SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import Callback, ElasticModel

what = sys.argv[1]

class Act(Callback):
    def on_iteration(self, loop, iteration):
        if what == "fails" and iteration.number >= 3:
            raise ValueError("as asked")
        if what == "is stopped":
            time.sleep(0.5)

torch.manual_seed(0)
model = nn.Linear(64, 8)
data = TensorDataset(torch.randn(480, 64), torch.randn(480, 8))
optimizer = torch.optim.AdamW(model.parameters())
ElasticModel(model, lambda: (data, None), nn.MSELoss(), optimizer, callbacks=[Act()]).train(
    epochs=100 if what == "is stopped" else 2, batch_size=48, checkpoint_every=5
)
"""
_ROUND = ("completes", "completes", "fails", "is stopped", "completes")


async def run_round(client: AsyncClient, script: Path) -> None:
    """Run a round of jobs to their ends. Raises AssertionError if one ends in another way than it should."""
    jobs = {await submit(client, script, what, name=what, max_workers=3): what for what in _ROUND}
    deadline = time.monotonic() + LONGEST_ROUND_SECONDS
    ended: dict[str, JobState] = {}
    while len(ended) < len(jobs):
        assert time.monotonic() < deadline, f"only {ended} of {jobs} have ended"
        await asyncio.sleep(0.2)
        for job in jobs.keys() - ended.keys():
            view = await client.job(job)
            if view.state.is_final:
                ended[job] = view.state
            elif jobs[job] == "is stopped" and view.iteration > 0:
                await client.stop(job)
    expected = {"completes": JobState.COMPLETED, "fails": JobState.FAILED, "is stopped": JobState.STOPPED}
    wrong = {job: state for job, state in ended.items() if state is not expected[jobs[job]]}
    assert not wrong, f"not as expected: {wrong} of {jobs}"


async def soak(pool: UpPool, script: Path, *, seconds: float) -> list[dict[str, float]]:
    """Run rounds for ``seconds``; return a sample for each."""
    samples: list[dict[str, float]] = []
    up = psutil.Process(pool.process.pid)
    end = time.monotonic() + seconds
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(find_server(home=pool.home)))
        bus = await Bus.open(read_credentials(pool.home / "bus" / "credentials" / "scheduler.json"), service="soak")
        stack.push_async_callback(bus.close)
        while time.monotonic() < end:
            await run_round(client, script)
            samples.append(await sample(up, pool.home, bus))
            memory = sum(value for name, value in samples[-1].items() if name.startswith("memory"))
            print(
                f"{len(samples) * len(_ROUND)} jobs, {memory:.0f} MiB, {end - time.monotonic():.0f} s left", flush=True
            )
    return samples


def judge(samples: Sequence[Mapping[str, float]]) -> list[Growth]:
    """Return how each measure has developed. One that is missing in a sample was 0 then."""
    names = sorted({name for measured in samples for name in measured})
    return [
        growth(name, [measured.get(name, 0.0) for measured in samples], slack=SLACK[name.split()[0]]) for name in names
    ]


def main() -> int:
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        script = Path(folder, "code", "short.py")
        script.parent.mkdir()
        script.write_text(_SCRIPT)
        options = ("--hosts", HOSTS, "--slots", SLOTS, "--keep-jobs", KEPT_JOBS)
        with pool_up(Path(folder, "home"), *options) as pool:
            samples = asyncio.run(soak(pool, script, seconds=60 * minutes))
    judged = judge(samples)
    print(f"\n{len(samples) * len(_ROUND)} jobs in {minutes:g} minutes; memory and bytes in MiB")
    for each in judged:
        print(f"{each.name:24} {each.early:9.1f} -> {each.late:9.1f}{'  GROWS' if each.is_growing else ''}")
    return int(any(each.is_growing for each in judged))


if __name__ == "__main__":
    sys.exit(main())
