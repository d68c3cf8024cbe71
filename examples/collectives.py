"""Training over the exchange alone, by members that come and go: docs/collectives.md."""

import argparse
import time
from typing import Any

import torch

from resile.collectives import MemberLost, join

parser = argparse.ArgumentParser()
parser.add_argument("address", help="what `python -m resile.collectives` prints")
parser.add_argument("--size", type=int, default=1, help="members with which the group starts")
parser.add_argument("--steps", type=int, default=100, help="leave after as many")
parser.add_argument("--seconds", type=float, default=0.0, help="of other work in each step")
args = parser.parse_args()

torch.manual_seed(0)
data, target = torch.randn(512, 8), torch.randn(512, 1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

with join(args.address, state, size=args.size, num_shards=16) as group:
    while state["step"] < args.steps:
        group.begin_iteration()
        losses = (((model(data[s::16]) - target[s::16]) ** 2).mean() for s in group.shards)
        try:
            mean = group.all_reduce(torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
        except MemberLost:
            continue  # the others hold its shards now
        for parameter, gradient in zip(model.parameters(), mean, strict=True):
            parameter.grad = gradient
        optimizer.step()
        state["step"] += 1
        print(f"step {state['step']} of {group.size} members", flush=True)
        time.sleep(args.seconds)
print("weights", float(torch.nn.utils.parameters_to_vector(model.parameters()).double().sum()).hex())
