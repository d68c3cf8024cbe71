"""A model that compares its rows, and that is called with so few that some workers have none."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import resile.training


class Centered(nn.Module):
    """It subtracts the mean of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs whose mean is zero."""
        outputs: Tensor = self.layer(inputs)
        return outputs - outputs.mean(0)


resile.training.seed()
x = torch.randn(96, 4)
model = Centered()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x), batch_size=16)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader, body="batch", num_shards=8)
for _ in loader.epochs(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        (model(inputs[:4]).square().mean() + model(inputs).square().mean()).backward()
        optimizer.step()
