"""A residual network on CIFAR-10: 50,000 colour images of ten kinds of things, randomly cropped and flipped.

    python examples/cifar10.py --data DIR                                   one process
    resile run examples/cifar10.py --workers 4 -- --data DIR                four workers
    resile submit examples/cifar10.py --max-workers 8 -- --data /full/path  on a pool

All of them end with the same parameters, bit for bit. DIR is the folder `cifar-10-batches-py`, which comes out of
`cifar-10-python.tar.gz` from https://www.cs.toronto.edu/~kriz/cifar.html. Its files are pickles; they are read without
running anything that they might contain.
"""

import argparse
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import resile.training
from resile.training import ElasticModel

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
VALIDATION = ("test_batch",)
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of each colour, over the training images
MARGIN = 4  # pixels by which a crop may be off


PARTS_OF_ARRAYS = {
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_reconstruct": np.empty(0).__reduce__()[0],  # where numpy keeps it differs from version to version
}


class ArraysOnly(pickle.Unpickler):
    """Reads a pickle of plain values and numpy arrays, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in PARTS_OF_ARRAYS:
            return PARTS_OF_ARRAYS[name]
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no array needs")


def read(file: Path) -> tuple[Tensor, Tensor]:
    """Return a file's images, uint8 of shape (N, 3, 32, 32), and their labels, int64 of shape (N,)."""
    try:
        with file.open("rb") as opened:
            content = ArraysOnly(opened, encoding="bytes").load()
        images = torch.from_numpy(content[b"data"].reshape(-1, 3, 32, 32))
        labels = torch.tensor(content[b"labels"], dtype=torch.int64)
        if images.dtype != torch.uint8 or len(images) != len(labels):
            raise ValueError("images and labels do not fit together")
    except OSError as error:
        sys.exit(f"{file.absolute()}: {error.strerror}; unpack cifar-10-python.tar.gz ({SOURCE}) again")
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError) as error:
        sys.exit(f"{file.absolute()} is not a file of CIFAR-10: {error}")
    return images, labels


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images of shape (3, 32, 32), and the numbers of their kinds."""

    def __init__(self, folder: Path, names: tuple[str, ...], *, augment: bool) -> None:
        images, labels = zip(*(read(folder / name) for name in names), strict=True)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
        self.images = (torch.cat(images) / 255 - mean) / deviation
        self.targets = torch.cat(labels)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:  # each sample has its own random numbers in each epoch, whichever worker fetches it
            down, right, mirrored = torch.randint(0, 2 * MARGIN + 1, (3,)).tolist()
            image = F.pad(image, (MARGIN,) * 4)[:, down : down + 32, right : right + 32]
            image = image.flip(2) if mirrored % 2 else image
        return image, self.targets[index]


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.stride, self.more = stride, outputs - inputs
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        around = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        x = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(x)) + around)


def network(*, depth: int) -> nn.Module:
    """A residual network of ``6 * depth + 2`` layers (arXiv:1512.03385, section 4.2)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for _ in range(depth):
            layers.append(Block(inputs, outputs, stride=1 if outputs == inputs else 2))
            inputs = outputs
    return nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of images whose kind has the highest score."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a residual network on CIFAR-10.")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder cifar-10-batches-py")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=192, help="images in an iteration, over all workers")
    parser.add_argument("--num-shards", type=int, default=12, help="parts of a batch: at most so many workers")
    parser.add_argument("--depth", type=int, default=3, help="the network has 6 times as many layers, and 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--num-workers", type=int, default=0, help="processes of each worker that read ahead")
    args = parser.parse_args()
    if not args.data.is_dir():
        sys.exit(
            f"there is no folder {args.data.absolute()}: unpack cifar-10-python.tar.gz ({SOURCE}), and give --data the "
            "full path of the folder cifar-10-batches-py"
        )

    def datasets() -> tuple[Pictures, Pictures]:
        return Pictures(args.data, TRAINING, augment=True), Pictures(args.data, VALIDATION, augment=False)

    resile.training.seed(args.seed)
    model = network(depth=args.depth).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    training, validation = datasets()
    iterations = args.epochs * math.ceil(len(training) / args.batch_size)
    warm_up = min(400, iterations // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / (warm_up + 1), (1 + math.cos(math.pi * step / iterations)) / 2),
    )
    elastic = ElasticModel(
        model,
        lambda: (training, validation),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer,
        lr_scheduler=schedule,
        metrics={"accuracy": accuracy},
        num_workers=args.num_workers,
    )
    result = elastic.train(
        epochs=args.epochs,
        batch_size=args.batch_size,
        num_shards=args.num_shards,
        seed=args.seed,
        clip_grad_norm=5.0,
        checkpoint_every="1 min",
    )
    print(f"validation accuracy {result.validation['accuracy']:.1%}")


if __name__ == "__main__":
    main()
