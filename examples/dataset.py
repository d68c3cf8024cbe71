"""Data that is registered once: handwritten digits from a file that each host fetches.

    python examples/dataset.py --write digits          # makes the file digits/digits.csv
    RESILE_DATASET_DIGITS=digits python examples/dataset.py
    resile dataset add digits digits --local
    resile run examples/dataset.py --data digits --workers 3

All end with the same parameters, bit for bit. In a pool: `resile dataset add digits URI`, then
`resile submit examples/dataset.py --data digits`. Lines that an ordinary script would not have are marked with
`# Resile`.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training  # Resile

parser = argparse.ArgumentParser()
parser.add_argument("--write", type=Path, metavar="FOLDER")
folder = parser.parse_args().write
if folder is not None:
    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "digits.csv", np.c_[digits.data, digits.target], fmt="%d", delimiter=",")
    raise SystemExit

resile.training.seed(0)  # Resile: instead of torch.manual_seed(0)
file = resile.training.dataset("digits") / "digits.csv"  # Resile: instead of the path
rows = torch.tensor(np.loadtxt(file, delimiter=","))
dataset = TensorDataset(rows[:, :-1].float() / 16, rows[:, -1].long())
loader = DataLoader(dataset, batch_size=96, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader)  # Resile

for epoch in loader.epochs(3):  # Resile: instead of range(3)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(f"epoch {epoch}: loss {loader.loss:.3f}")
