"""What plain scripts seldom do.

channels_last, a fused optimizer, float16 with a scaler, another default device, and averages of activations in buffers
that are one tensor at first, are replaced, or are written through ``.data``.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resile.training import ElasticModel, buffers, seed

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--optimizer", default="AdamW")
args = parser.parse_args()

BATCH, BATCHES = 24, 10


class Centered(nn.Module):
    """Subtracts averages of what it has seen in training."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", start)
        self.register_buffer("magnitude", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            self.magnitude.data.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return (x - self.mean) / (1 + self.magnitude)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 1))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.turned = nn.Parameter(torch.randn(4, 16).t())
        start = torch.zeros(())
        self.centered = nn.ModuleList([Centered(start), Centered(start)])
        self.out = nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.centered[0](self.front(x)).flatten(2).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0].mean(1)
        x = self.centered[1](x) @ self.turned
        return self.out(x.to(torch.bfloat16)).float()


seed(0)
x = torch.randn(BATCH * BATCHES + 1, 3, 6, 6)
dataset = TensorDataset(x, (x.sum((1, 2, 3)) > 0).long())
model = Mixed().to(args.device).to(memory_format=torch.channels_last)
buffers(model, mean="mean", magnitude="mean")
fused = {"fused": True} if args.optimizer == "AdamW" else {}
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-2, **fused)
if args.device != "cpu" or args.optimizer == "AdamW":  # PyTorch's other optimizers make tensors on it
    torch.set_default_device("meta" if args.device == "cpu" else args.device)
ElasticModel(
    model,
    lambda: (dataset, dataset),
    nn.functional.cross_entropy,
    optimizer,
    autocast=torch.float16 if args.device != "cpu" else None,
    grad_scaler=torch.amp.GradScaler(args.device, growth_interval=7),
).train(epochs=3, batch_size=BATCH, num_shards=12, checkpoint_every=10)
