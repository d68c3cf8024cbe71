"""What validations decide: the best model is kept, training ends early, and the learning rate falls at a plateau."""

import argparse

import torch
from torch import Tensor, nn

from resile.training import ElasticModel, Selection, seed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--schedule", choices=["plateau", "epoch"], default="plateau")
parser.add_argument("--unselected", action="store_true")
args = parser.parse_args()


class Labels(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Labels with so many errors that a model soon learns those by heart."""

    def __init__(self, size: int, generator: int) -> None:
        random = torch.Generator().manual_seed(generator)
        self.x = torch.randn(size, 16, generator=random)
        wrong = torch.rand(size, generator=random) < 0.3
        self.y = ((self.x[:, :4].sum(1) > 0) ^ wrong).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
schedule = (
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=0)
    if args.schedule == "plateau"
    else torch.optim.lr_scheduler.StepLR(optimizer, 2)
)
elastic = ElasticModel(
    model,
    lambda: (Labels(480, 1), Labels(120, 2)),
    nn.functional.cross_entropy,
    optimizer,
    schedule,
    lr_scheduler_interval="epoch",
)
result = elastic.train(
    epochs=args.epochs,
    batch_size=24,
    num_shards=12,
    checkpoint_every=10,
    selection=None if args.unselected else Selection("loss", patience=3),
)
if elastic.is_lowest_rank:
    print(f"best {result.best}, {result.iterations} iterations, learning rate {optimizer.param_groups[0]['lr']:g}")
