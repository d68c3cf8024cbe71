"""One situation of docs/fidelity.md, by its name, which prints a digest of the models and of what it has printed."""

import argparse
import hashlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.learner.fidelity import table
from tests.learner.fidelity.situation import Script

parser = argparse.ArgumentParser()
parser.add_argument("name", choices=table.SITUATIONS)
parser.add_argument("--body", choices=("batch", "shard"), default="batch")
args = parser.parse_args()
torch.manual_seed(0)
script = Script(args.body)
table.SITUATIONS[args.name].run(script)
if script.loader.is_lowest_rank:
    digest = hashlib.sha256(repr(script.printed).encode())
    for model in script.models:
        for name, value in model.state_dict().items():
            digest.update(name.encode() + value.numpy().tobytes())
    print(f"digest {digest.hexdigest()}", file=sys.stderr)
