"""Trains a model of which some parameters and buffers have no elements, in the way that its argument names."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import resile.training
from resile.training import ElasticLoop, ElasticModel, prepare


class Model(nn.Module):
    """Has an empty parameter that is used, some with dtypes of their own, one that is frozen, and empty buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.used = nn.Linear(8, 0, bias=False)
        self.precise = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.reduced = nn.Parameter(torch.zeros(3, 0, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(0), requires_grad=False)
        self.register_buffer("floats", torch.zeros(0))
        self.register_buffer("counts", torch.zeros(2, 0, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a row for each sample."""
        hidden = self.main(inputs)
        nothing: Tensor = self.used(hidden).sum() + self.precise.sum().float() + self.reduced.sum().float()
        return hidden.pow(2) + nothing


resile.training.seed(0)
data = TensorDataset(torch.randn(72, 4), torch.zeros(72))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
match sys.argv[1]:
    case "model":
        ElasticModel(model, lambda: (data, None), lambda outputs, _: outputs.mean(), optimizer).train(
            2, batch_size=24, num_shards=6
        )
    case "loop":
        for iteration in ElasticLoop(model, optimizer, data, epochs=2, batch_size=24, num_shards=6):
            for inputs, _ in iteration.shards():
                iteration.backward(model(inputs).mean())
            if iteration.exchange():
                optimizer.step()
    case body:
        loader = DataLoader(data, batch_size=24)
        elastic, optimizer, loader = prepare(model, optimizer, loader, body=body, num_shards=6)
        for _ in loader.epochs(2):
            for inputs, _ in loader:
                optimizer.zero_grad()
                elastic(inputs).mean().backward()
                optimizer.step()
