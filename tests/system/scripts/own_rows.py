"""A loop over images that its dataset augments, which notes each sample that it reads."""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import resile.training

parser = argparse.ArgumentParser()
parser.add_argument("notes", type=Path, help="a folder for a file of each process, with the samples that it read")
parser.add_argument("--uses", choices=("labels", "images"), help="what the body uses before it calls the model")
parser.add_argument("--readers", type=int, default=0)
args = parser.parse_args()


class Images(Dataset[tuple[Tensor, int]]):
    """96 images, turned upside down or not."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with (args.notes / str(os.getpid())).open("a") as notes:
            notes.write(f"{index}\n")
        image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(index))
        return (image.flip(1) if torch.rand(()) < 0.5 else image), index % 2


resile.training.seed()
model = nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(900, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Images(), batch_size=32, shuffle=True, num_workers=args.readers)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader, body="batch", num_shards=8)
for _ in loader.epochs(4):
    for images, labels in loader:
        images, labels = images.to("cpu", torch.float32), labels.long()
        if args.uses == "labels":
            print(f"labels {int(labels.sum())}")
        if args.uses == "images":
            images = images - images.mean()
        loss = F.cross_entropy(model(images), labels) * (1 + 0.1 * torch.rand(()))  # whoever has read what meanwhile
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loader.iteration} {loss.item():.6f} {int(labels.sum())}", flush=True)
