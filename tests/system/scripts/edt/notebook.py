"""A script for version 4.0 of IBM's API: other modules, a logger without a base class, batches of its own."""

import torch
from pyedt.fabric_model import FabricModel
from torch import nn


class Named:
    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"x": self.inputs[index]}, self.inputs[index].sum(0, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, named):
        return self.layer(named["x"])


class MyLogger:
    def log_train_metrics(self, metrics, iteration, epoch, workers):
        print(f"epoch {epoch}, {iteration} iterations: {sorted(metrics)}")

    def log_test_metrics(self, metrics, iteration, epoch):
        print(f"tested after {iteration} iterations: {sorted(metrics)}")

    def on_train_end(self):
        print("trained")


def get_datasets():
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return Named(inputs[:30]), Named(inputs[30:])


def collate(batch):
    inputs, targets = zip(*batch)
    return {"x": torch.stack([each["x"] for each in inputs])}, torch.stack(targets)


def distance(outputs, targets):
    return (outputs - targets).abs().mean()


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
edt_model = FabricModel(
    model,
    get_datasets,
    nn.functional.mse_loss,
    optimizer,
    metrics=[distance],
    driver_logger_callback=MyLogger(),
    fn_batch_collate=collate,
)
edt_model.train(2, 2, worker_num=3, worker_device_num=2)
edt_model.download(out_dir="downloaded")
