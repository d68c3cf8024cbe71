"""A model whose outputs are so large that workers give them to each other in several rounds."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training


class Wide(nn.Module):
    """It has as many classes as a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 80_000))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the classes."""
        logits: Tensor = self.layers(inputs)
        return logits


resile.training.seed()
x = torch.randn(64, 8)
y = (x[:, 0] > 0).long()
model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader, body="batch", num_shards=8)
for _ in loader.epochs(4):
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
