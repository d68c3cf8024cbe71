"""Handwritten digits by the training call: convolutions, BatchNorm, dropout, random augmentation.

    python examples/digits.py                                   one process
    resile run examples/digits.py --workers 3                   three workers
    resile run examples/digits.py --plan 0:1,50:4,150:2         another number of workers from iterations 50 and 150 on

All of them end with the same parameters, bit for bit. The data, 1797 images of 8 x 8 pixels, come with scikit-learn.
"""

import argparse
import math
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

import resile.training
from resile.training import ElasticModel


@cache
def images_and_digits() -> tuple[Tensor, Tensor]:
    """Read all images, of shape (1797, 1, 8, 8) with values in 0..1, and their digits, once in each worker."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of shape (1, 8, 8) with values in 0..1, and their digits."""

    def __init__(self, *, augment: bool) -> None:
        self.images, self.targets = images_and_digits()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:  # each sample has its own random numbers in each epoch, whichever worker fetches it
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
            image = image + 0.05 * torch.randn_like(image)
        return image, self.targets[index]


def datasets() -> tuple[Subset[tuple[Tensor, Tensor]], Subset[tuple[Tensor, Tensor]]]:
    """Split off every fifth image for validation."""
    augmented, plain = Digits(augment=True), Digits(augment=False)
    training = [index for index in range(len(plain)) if index % 5]
    return Subset(augmented, training), Subset(plain, range(0, len(plain), 5))


def network() -> nn.Module:
    """Three convolutions, and a classifier over four cells of the image."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32),
        *block(32, 32),
        nn.MaxPool2d(2),
        *block(32, 64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of images whose digit has the highest score."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def main() -> None:
    """Train, and print how well it went."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=192, help="samples in an iteration, over all workers")
    parser.add_argument("--num-shards", type=int, help="parts of a batch: at most so many workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where torch.autocast does")
    args = parser.parse_args()

    resile.training.seed(args.seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    iterations = args.epochs * math.ceil(len(datasets()[0]) / args.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=iterations)
    elastic = ElasticModel(
        model,
        datasets,
        nn.CrossEntropyLoss(label_smoothing=0.05),
        optimizer,
        lr_scheduler=schedule,
        metrics={"accuracy": accuracy},
        autocast=torch.bfloat16 if args.bf16 else None,
    )
    result = elastic.train(
        epochs=args.epochs,
        batch_size=args.batch_size,
        num_shards=args.num_shards,
        seed=args.seed,
        clip_grad_norm=5.0,
        checkpoint_every="20 s",
    )
    print(f"validation accuracy {result.validation['accuracy']:.1%}")


if __name__ == "__main__":
    main()
