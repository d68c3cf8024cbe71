"""Workers that exchange their gradients in shared memory: grown, killed, frozen and shrunk, with the same bits."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from .paced import CALLBACK
from .running import plain
from .struck import run_struck

EPOCHS = 30
SCRIPT = f"""
import argparse
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import ElasticModel, seed
{CALLBACK}
parser = argparse.ArgumentParser()
parser.add_argument("--pace")
args = parser.parse_args()
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
@pytest.mark.timeout(600)
def test_workers_that_share_memory_may_grow_die_freeze_and_shrink(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    outcome = run_struck(script, tmp_path, leaves_at=295, are_linked=share_memory)
    assert outcome.sha == plain(script)
    outcome.assert_every_sample_once(epochs=EPOCHS)
