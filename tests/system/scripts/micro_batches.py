"""The mode fast, in passes of no more than so many samples."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resile.training import ElasticModel, seed

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch-size", type=int)
limit = parser.parse_args().micro_batch_size


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) <= (limit or len(x)), f"a pass has {len(x)} samples"
        return self.layers(x)


seed(0)
x = torch.randn(48 * 10 + 5, 16)
dataset = TensorDataset(x, (x.sum(1) > 0).long())
model = Net()
ElasticModel(
    model, lambda: (dataset, dataset), nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
).train(epochs=3, batch_size=48, mode="fast", micro_batch_size=limit, checkpoint_every=10)
