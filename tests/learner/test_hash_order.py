"""A plain script says so if its bits may depend on the order of sets, which is another one in each process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resile_learner.hash_order import SETS

SCRIPT = """
import torch
from torch.utils.data import DataLoader
from resile.training import prepare

words = ["one", "two", "three", "four"]
order = {order}
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.eye(4)[[words.index(word) for word in order]].repeat(2, 1)
model, optimizer, loader = prepare(model, optimizer, DataLoader(inputs, batch_size=8))
for epoch in loader.epochs(1):
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
print(loader.result.bits)
"""


@pytest.mark.parametrize(
    ("order", "seed", "bits"),
    [
        ("list(set(words))", "random", f"bits not guaranteed: {SETS}"),
        ("[word for word in {'one', 'two'}]", "random", f"bits not guaranteed: {SETS}"),
        ("list(set(words))", "0", "same bits"),
        ("sorted(set(words))", "random", "same bits"),
        ("[word for word in words if word in {'one', 'two'}]", "random", "same bits"),
    ],
)
def test_a_plain_script_whose_bits_may_depend_on_hashes_says_so(
    order: str, seed: str, bits: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{order}", order))
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == bits
    assert (f", {bits}" in done.stderr) == (bits != "same bits")
