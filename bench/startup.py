"""How long `resile run` takes from the command to the first committed iteration, beside `python script.py`.

    python bench/startup.py [--quick | --tiny]

Both train the same small model; the launched run has two workers. The time ends in a callback of the first iteration.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from report import Target, argument_parser, conclude, print_table

SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import resile.training
from resile.training import Callback, ElasticModel

class Stamp(Callback):
    def on_iteration(self, loop, iteration):
        if iteration.number == 0:
            open(sys.argv[1], "w").write(repr(time.time()))

resile.training.seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
data = TensorDataset(torch.zeros(384, 64), torch.zeros(384, dtype=torch.long))
optimizer = torch.optim.AdamW(model.parameters())
ElasticModel(model, lambda: (data, None), nn.CrossEntropyLoss(), optimizer, callbacks=[Stamp()]).train(batch_size=192)
"""
LIMIT = 1.6
"""Times the plain script: a launcher, and a fork server that imports what workers share."""


def seconds(command: Sequence[str], stamp: Path) -> float:
    """Return the seconds from the start of ``command`` to the first iteration."""
    begun = time.time()
    subprocess.run([*command, str(stamp)], check=True, capture_output=True)
    return float(stamp.read_text()) - begun


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    turns = args.length.pick(full=20, quick=7, tiny=1)
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        run = [
            sys.executable,
            "-m",
            "resile",
            "run",
            str(script),
            "-w",
            "2",
            "-q",
            "--home",
            str(folder / "home"),
            "--",
        ]
        found: dict[str, list[float]] = {"resile run, 2 workers": [], "python": []}
        for _ in range(turns):
            found["resile run, 2 workers"].append(seconds(run, folder / "stamp"))
            found["python"].append(seconds([sys.executable, str(script)], folder / "stamp"))
    launched, plain = (statistics.median(times) for times in found.values())
    rows = [(what, f"{statistics.median(t):.2f}", f"{min(t):.2f}", f"{max(t):.2f}") for what, t in found.items()]
    print_table("From the command to the first iteration", ("", "median s", "min s", "max s"), rows)
    conclude([Target("resile run, times the plain script", launched / plain, LIMIT)], args.length)


if __name__ == "__main__":
    main()
