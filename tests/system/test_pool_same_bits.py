"""Promises 1 and 2 on a pool: the same bits and every sample once, whatever other jobs come, change and go."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from resile.client import AsyncClient, find_server
from resile_shared.http.api import JobView

from .conftest import TRAIN
from .paced import CALLBACK, Pace, becomes, submit
from .pools import UpPool, pool_up
from .running import plain

STAY = 10  # committed iterations at each number of workers

SCRIPT = f"""
import argparse
import torch
from torch import nn
from resile.training import ElasticModel, seed
{CALLBACK}
parser = argparse.ArgumentParser()
parser.add_argument("--pace")
args = parser.parse_args()

BATCH, BATCHES, EPOCHS = 48, 20, 10

class Shifted(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(BATCH * BATCHES + 1, 1, 6, 6, generator=generator)
        self.targets = (self.images[:, 0, :3].sum((1, 2)) > 0).long()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.images[index].roll(int(torch.randint(-1, 2, ())), dims=2)
        return image.flip(2) if torch.randint(2, ()) else image, self.targets[index]

seed(3)
model = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(96, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=BATCHES * EPOCHS)
ElasticModel(
    model, lambda: (Shifted(), None), nn.CrossEntropyLoss(), optimizer, schedule, callbacks=[Pace(args.pace)]
).train(epochs=EPOCHS, batch_size=BATCH, num_shards=24, seed=5, clip_grad_norm=0.5)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """Two hosts of four slots."""
    with pool_up(tmp_path_factory.mktemp("pool") / "home", "--hosts", 2, "--slots", 4) as pool:
        yield pool


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the measured script and that of the job that disturbs it."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "measured.py").write_text(SCRIPT)
    (folder / "other.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def sha(code: Path) -> str:
    """The bits of the plain script."""
    return plain(code / "measured.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("most", "priorities", "sizes"),
    [
        pytest.param(1, (5000, 10000), (1, 1, 1, 1), marks=pytest.mark.nightly),
        (3, (15000, 5000, 15000), (3, 2, 3, 2, 3)),
        pytest.param(5, (5000, 10000), (5, 4, 3, 5), marks=pytest.mark.nightly),
        pytest.param(8, (5000, 10000), (8, 4, 3, 8), marks=pytest.mark.nightly),
    ],
)
async def test_a_job_has_the_bits_of_the_plain_script_whatever_another_job_does_to_its_share(
    most: int, priorities: tuple[int, ...], sizes: tuple[int, ...], pool: UpPool, code: Path, sha: str, tmp_path: Path
) -> None:
    pace = Pace(tmp_path / "pace")
    async with AsyncClient(find_server(home=pool.home)) as client:
        job = await submit(client, code / "measured.py", "--pace", pace.file, name="measured", max_workers=most)
        await stays(client, job, sizes[0], pace)
        endless = ("--epochs", 10_000, "--pause", 0.2, "--shards", 24)
        share = {"priority": priorities[0], "max_workers": 2 * most}
        other = await submit(client, code / "other.py", *endless, name="other", **share)
        await becomes(client, other, lambda view: view.iteration)
        for priority, size in zip(priorities, sizes[1:-1], strict=True):
            await client.set_priority(other, priority)
            await stays(client, job, size, pace)
        await client.stop(other)
        await stays(client, job, sizes[-1], pace)
        pace.fast_until(10**6)
    view = JobView.model_validate(pool.completed(job))

    assert view.params_sha256 == sha
    assert view.bits == "same bits"
    assert is_within(without_repeats(sizes), settled_sizes(view))
    ledger = pool.ask("ledger", job)["epochs"]
    assert [epoch["epoch"] for epoch in ledger] == list(range(10))
    for epoch in ledger:
        assert (epoch["samples"], epoch["once"], epoch["more"], epoch["never"]) == (961, 961, 0, 0)


async def stays(client: AsyncClient, job: str, workers: int, pace: Pace) -> None:
    """Wait until the job has trained long enough with so many workers."""
    begun = await becomes(client, job, lambda view: view.workers == workers)
    pace.fast_until(begun.iteration + STAY + 1)
    await becomes(client, job, lambda view: view.iteration > begun.iteration + STAY)


def settled_sizes(view: JobView) -> list[int]:
    """The numbers of workers, one after the other, with which a completed job has trained long enough."""
    changes = [item for item in view.history if item.kind in ("allocation", "completed")]
    return [begun.workers for begun, ended in pairwise(changes) if ended.iteration - begun.iteration >= STAY]


def without_repeats(sizes: tuple[int, ...]) -> list[int]:
    """``sizes`` without those that are as the one before."""
    return [size for size, before in zip(sizes, (0, *sizes), strict=False) if size != before]


def is_within(wanted: list[int], seen: list[int]) -> bool:
    """Whether ``wanted`` is what is left of ``seen`` when some are left out."""
    rest = iter(seen)
    return all(size in rest for size in wanted)
