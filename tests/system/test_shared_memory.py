"""Workers that exchange their gradients in shared memory: grown, killed, frozen and shrunk, with the same bits."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .paced import CALLBACK, Pace
from .pools import UpPool, pool_up
from .running import plain
from .struck import run_struck

EPOCHS = 30
SCRIPT = f"""
import argparse
import resource
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import ElasticModel, seed
{CALLBACK}
parser = argparse.ArgumentParser()
parser.add_argument("--pace")
parser.add_argument("--largest-file", type=int)
args = parser.parse_args()
if args.largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (args.largest_file, args.largest_file))
seed(0)
inputs = torch.randn(240, 16)
targets = (inputs[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(16, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
ElasticModel(
    model, lambda: (TensorDataset(inputs, targets), None), nn.CrossEntropyLoss(), optimizer, callbacks=[Pace(args.pace)]
).train(epochs={EPOCHS}, batch_size=24, num_shards=6, checkpoint_every=100)
"""
"""Its one bucket has 2.6 MB: enough for shared memory."""


def share_memory(pids: Sequence[int]) -> bool:
    """Whether each of these workers has mapped its own segment and that of each other."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    return all(text.count("memfd:resile") >= len(pids) for text in maps)


@pytest.mark.long
def test_workers_that_share_memory_may_grow_die_freeze_and_shrink(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    outcome = run_struck(script, tmp_path, leaves_at=295, are_linked=share_memory)
    assert outcome.sha == plain(script)
    outcome.assert_every_sample_once(epochs=EPOCHS)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[UpPool]:
    """Two hosts of two slots, as root each with a network of its own."""
    own_networks = ["--namespaces"] if os.geteuid() == 0 else []
    with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 2, *own_networks) as pool:
        yield pool


def exchange_of(pool: UpPool, job: str, words: str) -> str:
    """How `resile job` says that its workers exchange, once it contains ``words``. Rates of links come later."""

    def is_shown(view: dict[str, Any]) -> bool:
        lines = pool.run("job", job).out.splitlines()
        shown = [line.removeprefix("exchange").strip() for line in lines if line.startswith("exchange ")]
        return words in view["exchange_path"] and shown == [view["exchange_path"]]

    return str(pool.becomes(job, is_shown)["exchange_path"])


@pytest.mark.long
def test_a_job_shows_how_its_workers_exchange(pool: UpPool, tmp_path: Path) -> None:
    """Of two jobs on the same hosts one may make no file as large as a segment."""
    pace = Pace(tmp_path / "pace")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    forms = [(4, ()), (2, ("--largest-file", 1 << 20)), (1, ())]
    texts = []
    for workers, options in forms:
        limits = ("--min-workers", workers, "--max-workers", workers)
        job = pool.submit(*limits, script, "--", "--pace", pace.file, *options)
        if workers == 1:
            view = pool.becomes(job, lambda view: view["iteration"] > 5)
            assert view["exchange_path"] == ""
            assert "exchange" not in pool.run("job", job).out
        else:
            texts.append(exchange_of(pool, job, "Errno" if options else "shared memory"))
        assert pool.run("stop", job).status == 0
    shared, refused = texts
    own_networks = "within 2 groups of 2 workers and one fold per group over TCP " if os.geteuid() == 0 else ""
    assert shared.startswith(f"shared memory {own_networks}for buckets of ")
    assert refused.startswith("over TCP; not all workers of a host share memory: [Errno 27]")
