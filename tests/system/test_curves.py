"""Curves are whole, whoever has written them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from resile.client import AsyncClient, find_server

from .paced import CALLBACK, Pace, becomes, submit
from .pools import UpPool, pool_up

EXAMPLE = Path(__file__).parents[2] / "examples" / "curves.py"
ITERATIONS, EVERY = 80, 2

SLOWER = f"""
import curves, os
{CALLBACK}
pace, written = Pace(os.environ["PACE"]), curves.Curves.on_iteration

def on_iteration(self, loop, iteration):
    written(self, loop, iteration)
    pace.on_iteration(loop, iteration)

curves.Curves.on_iteration = on_iteration
curves.main()
"""
"""The example, at a pace that the test sets."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[UpPool]:
    """Two hosts of one slot."""
    with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 1) as pool:
        yield pool


def points(folder: Path) -> list[tuple[int, str]]:
    """The points of the loss curve, (step, file), one file after the other."""
    return [
        (event.step, file.name)
        for file in sorted(folder.iterdir())
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "loss"
    ]


async def test_each_point_of_a_curve_is_written_once_though_its_first_writer_has_left(
    pool: UpPool, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(EXAMPLE, code)
    (code / "train.py").write_text(SLOWER)
    pace = Pace(tmp_path / "pace")
    async with AsyncClient(find_server(home=pool.home)) as client:
        job = await submit(
            client,
            code / "train.py",
            *("--epochs", ITERATIONS // 8, "--every", EVERY),
            name="curves",
            env={"PACE": str(pace.file)},
        )
        both = await becomes(client, job, lambda view: view.workers == 2)
        pace.fast_until(both.iteration + 10)
        both = await becomes(client, job, lambda view: view.iteration >= both.iteration + 10)
        lowest_rank = both.slots[0].partition("/")[0]
        await client.drain(lowest_rank)
        alone = await becomes(client, job, lambda view: view.workers == 1)
        assert not alone.slots[0].startswith(lowest_rank)
        pace.fast_until(ITERATIONS)
    pool.completed(job)
    fetched = pool.run("output", job, "-o", tmp_path / "fetched")
    assert fetched.status == 0, fetched.err
    seen = points(tmp_path / "fetched")
    assert [step for step, _ in seen] == list(range(0, ITERATIONS, EVERY))
    assert len({file for _, file in seen}) == 2, "one file of each worker that was the lowest rank"
