"""A script for IBM's Elastic Distributed Training, for a table of docs/migrating.md."""

import torch
from fabric_model import FabricModel
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(0)


def get_datasets() -> tuple[TensorDataset, TensorDataset]:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return dataset, dataset


model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
edt_model = FabricModel(model, get_datasets, F.cross_entropy, optimizer)
edt_model.train(3, 6, engines_number=4)
