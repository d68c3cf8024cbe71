"""SimCLR and CLIP of a toy size: each sample of a batch is compared with all others of it. 24 iterations.

``--plain`` trains without Resile; ``--write FILE`` stores the parameters. ``--seconds`` is how long an iteration waits.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["simclr", "clip"])
parser.add_argument("--plain", action="store_true")
parser.add_argument("--write")
parser.add_argument("--seconds", type=float, default=0.0)
args = parser.parse_args()


def encoder(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = encoder(24), encoder(12)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.scale.exp()


def of_views(model: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
    """Two views of each sample, of which each has to find the other among all of the batch."""
    views = torch.cat([images + 0.1 * torch.roll(images, shift, dims=1) for shift in (1, 2)])
    rows = F.normalize(model(views), dim=1)
    similar = rows @ rows.T / 0.2
    similar = similar.masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, torch.arange(len(rows)).roll(len(images)))


def of_pairs(model: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
    """Each image has to find its text among all of the batch, and each text its image."""
    of_images, of_texts, scale = model(images, texts)
    logits, own = scale * of_images @ of_texts.T, torch.arange(len(images))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


resile.training.seed(0)
images = torch.randn(256, 24)
texts = images[:, :12].tanh() + 0.1 * torch.randn(256, 12)
model, loss_of = (encoder(24), of_views) if args.kind == "simclr" else (Clip(), of_pairs)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(images, texts), batch_size=32)
if args.plain:
    epochs = range(3)
else:
    model, optimizer, loader = resile.training.prepare(model, optimizer, loader, num_shards=8)
    epochs = loader.epochs(3)
for _ in epochs:
    for batch in loader:
        time.sleep(args.seconds)
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
    print(f"loss {float(loss.detach()):.5f}", flush=True)
if args.write:
    torch.save(model.state_dict(), args.write)
