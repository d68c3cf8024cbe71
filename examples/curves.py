"""TensorBoard curves of a training whose workers come and go.

    python examples/curves.py
    resile run examples/curves.py --workers 3
    resile submit examples/curves.py                and then: resile output curves -o curves
    tensorboard --logdir curves                     while it trains, or afterwards

Needs tensorboard, and scikit-learn for its data. On a pool, what is written to the folder RESILE_OUTPUT_DIR can be
fetched at any time, on whichever hosts it was written.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import resile.training
from resile.training import Callback, ElasticLoop, ElasticModel, Iteration, Result


class Curves(Callback):
    """Writes the curves of the lowest rank; each worker that becomes the lowest rank writes a new file."""

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer, *, every: int) -> None:
        self.folder = folder
        self.optimizer = optimizer
        self.every = every
        self.writer: SummaryWriter | None = None

    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        if iteration.number % self.every == 0:
            assert iteration.loss is not None
            self.write("loss", iteration.loss, iteration.number)
            self.write("learning rate", self.optimizer.param_groups[0]["lr"], iteration.number)
            self.flush()

    def on_epoch(self, loop: ElasticLoop, epoch: int) -> None:
        if loop.validation:  # that of the epoch before: this one's comes next
            self.write("validation accuracy", loop.validation["accuracy"], epoch * loop.plan.per_epoch)
            self.flush()

    def on_end(self, loop: ElasticLoop, result: Result) -> None:
        self.write("validation accuracy", result.validation["accuracy"], result.iterations)
        self.flush()

    def write(self, name: str, value: float, step: int) -> None:
        """Add one point. The first one makes the file: workers that never are the lowest rank write none."""
        if self.writer is None:
            # A job that lost all its workers resumes from a checkpoint; TensorBoard drops what was written after it.
            self.writer = SummaryWriter(str(self.folder), purge_step=step)
        self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write to the file itself: a worker may leave after any iteration, and its script is not asked."""
        assert self.writer is not None
        self.writer.flush()


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Split off every fifth image for validation."""
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(targets)) % 5 == 0
    return TensorDataset(images[~held_out], targets[~held_out]), TensorDataset(images[held_out], targets[held_out])


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of images whose digit has the highest score."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, and draw curves.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="iterations from one point of a curve to the next")
    parser.add_argument("--folder", type=Path, help="by default RESILE_OUTPUT_DIR, or else curves")
    args = parser.parse_args()

    resile.training.seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    folder = args.folder or Path(os.environ.get("RESILE_OUTPUT_DIR", "curves"))
    curves = Curves(folder, optimizer, every=args.every)
    elastic = ElasticModel(
        model, datasets, nn.CrossEntropyLoss(), optimizer, schedule, {"accuracy": accuracy}, callbacks=[curves]
    )
    elastic.train(epochs=args.epochs, batch_size=192, checkpoint_every="20 s")


if __name__ == "__main__":
    main()
