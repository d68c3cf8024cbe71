"""A loop that prints, counts, accumulates and averages, and strikes itself once at each line of its body."""

import argparse
import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training
from resile_learner.session import current_session

parser = argparse.ArgumentParser()
parser.add_argument("--strike", choices=["SIGKILL", "SIGSTOP"], help="the signal; without it, nothing is struck")
parser.add_argument("--struck", type=Path, help="a folder, with a file for each line that was struck")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--freeze-seconds", type=float, default=0.5)
args = parser.parse_args()
NUM_WORKERS = 3


def strike(frame: FrameType, event: str, _: Any) -> Any:
    """Strike this process if the next line to be struck comes, the lowest rank every other time."""
    if frame.f_code.co_filename != __file__:
        return None
    first, last = body_lines()
    if event != "line" or not first <= frame.f_lineno <= last:
        return strike
    number, view = len(list(args.struck.iterdir())), current_session().view
    is_mine = view.rank == (0 if number % 2 == 0 else NUM_WORKERS - 1)
    if frame.f_lineno == first + number and is_mine and view.size == NUM_WORKERS:
        (args.struck / f"{frame.f_lineno}").touch(exist_ok=False)
        thaw = f"sleep {args.freeze_seconds}; kill -CONT {os.getpid()}"
        if args.strike == "SIGSTOP":
            subprocess.Popen(["sh", "-c", thaw], start_new_session=True)
        os.kill(os.getpid(), signal.Signals[args.strike])
    return strike


def body_lines() -> tuple[int, int]:
    """The first and the last line of the body."""
    lines = Path(__file__).read_text().splitlines()
    ends = [number for number, line in enumerate(lines, 1) if line.strip() in ("# body", "# end of the body")]
    return ends[0] + 1, ends[1] - 1


def is_over() -> bool:
    """Whether each line was struck."""
    first, last = body_lines()
    return not args.strike or len(list(args.struck.iterdir())) == last - first + 1


resile.training.seed()
x = torch.randn(240, 8)
y = (x[:, 0] > 0.5).long()
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
data = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
model, optimizer, loader, schedule = resile.training.prepare(
    model, optimizer, data, schedule, num_shards=6, checkpoint_every=5
)
average = copy.deepcopy(model)
seen, right, losses = 0, 0, []
if args.strike:
    sys.settrace(strike)
    sys._getframe().f_trace = strike
for epoch in loader.epochs(args.epochs):
    for inputs, targets in loader:
        # body
        logits = model(inputs)
        loss = F.cross_entropy(logits, targets, weight=torch.tensor([1.0, 9.0]))
        (loss / 2).backward()
        seen += len(inputs)
        right += int((logits.argmax(1) == targets).sum())
        losses.append(loss.item())
        print(f"{loader.iteration} {epoch} {loss.item():.6f} {sum(losses) / len(losses):.6f}", flush=True)
        if loader.iteration % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad():
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.1)
        print(f"{loader.iteration} {seen} {right} {next(average.parameters()).mean():.6f}", flush=True)
        # end of the body
        if not is_over():
            time.sleep(0.05)
