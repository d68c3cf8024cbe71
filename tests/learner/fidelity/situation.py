"""What a situation is: a training loop as a script would have it, which is told whether it is elastic."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.training import prepare

SAMPLES, BATCH, SHARDS, EPOCHS = 96, 32, 8, 3
Body = Literal["plain", "batch", "shard"]
LossFunction = Callable[[Any, Tensor], Tensor]


class Script:
    """What the loop of a situation uses: `prepare` does nothing in a plain run."""

    def __init__(self, body: Body, *, batch_size: int = BATCH, seed: int = 0) -> None:
        self.body = body
        self.seed = seed
        self.batch_size = batch_size
        self.models: list[nn.Module] = []
        self.loader: Any = None
        self.printed: list[float] = []

    def prepare(self, model: Any, optimizer: Any, loader: Any = None, **options: Any) -> Any:
        """Return what `resile.training.prepare` returns: model, optimizer, loader, and ``scheduler`` if it is given."""
        loader = self.loader_of(data()) if loader is None else loader
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        found: Any = (model, optimizer, loader, *([options["scheduler"]] if "scheduler" in options else []))
        if self.body != "plain":
            found = prepare(model, optimizer, loader, body=self.body, num_shards=SHARDS, **options)
        self.loader = found[2]
        return found

    def loader_of(self, dataset: Any, **options: Any) -> Any:
        return DataLoader(dataset, **{"batch_size": self.batch_size, **options})

    def epochs(self, number: int = EPOCHS) -> Iterable[int]:
        if self.body == "plain":
            torch.manual_seed(self.seed)
            return range(number)
        epochs: Iterable[int] = self.loader.epochs(number)
        return epochs

    def print(self, *values: Any) -> None:
        """Print numbers; those of a body that runs for each shard belong to shards."""
        self.printed += [float(torch.as_tensor(value).detach()) for value in values]


class Parts(NamedTuple):
    """Of which a usual loop consists, for the ways that have no loop of the script's own."""

    model: Callable[[], nn.Module]
    loss: LossFunction
    data: Callable[[], Any]


class Situation(NamedTuple):
    name: str
    text: str
    run: Callable[[Script], None]
    parts: Parts | None = None
    is_random: bool = False
    """Whether it draws random numbers while it trains, which plain PyTorch and Resile seed each in their way."""
    needs_order: bool = False
    """Whether it depends on the order of samples in a batch, which ElasticModel shuffles."""
    begins_late: bool = False
    """Whether it is like a usual loop in its first iterations: it is in time to name it when it is not any more."""
    tolerance: float = 1e-5


SITUATIONS: dict[str, Situation] = {}


def data(samples: int = SAMPLES) -> TensorDataset:
    """Rows of 8 numbers with a rare class, and labels that most of the first samples do not have."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)[:samples]
    return TensorDataset(x, (x[:, 0] > 0.8).long())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loop(text: str, **options: Any) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    """Declare a situation by its whole loop."""

    def declared(run: Callable[[Script], None]) -> Callable[[Script], None]:
        SITUATIONS[run.__name__] = Situation(run.__name__, text, run, **options)
        return run

    return declared


def loss(
    text: str,
    model: Callable[[], nn.Module] = perceptron,
    *,
    data: Callable[[], Any] = data,
    **options: Any,
) -> Callable[[LossFunction], LossFunction]:
    """Declare a situation by its loss and its model, in the usual loop."""

    def declared(loss_fn: LossFunction) -> LossFunction:
        def usual(script: Script) -> None:
            made = model()
            net, optimizer, loader = script.prepare(made, sgd(made), script.loader_of(data()))
            for _ in script.epochs():
                for inputs, targets in loader:
                    optimizer.zero_grad()
                    value = loss_fn(net(inputs), targets)
                    value.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    script.print(value)

        name = loss_fn.__name__
        SITUATIONS[name] = Situation(name, text, usual, parts=Parts(model, loss_fn, data), **options)
        return loss_fn

    return declared


def given(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of a model that computes it."""
    found: Tensor = outputs
    return found


def in_model(text: str, of_logits: LossFunction, name: str) -> None:
    """Declare a situation whose loss is computed in the model, from targets that its inputs have."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, inputs: Tensor) -> Tensor:
            return of_logits(self.layers(inputs), (inputs[:, 0] > 0.8).long())

    def computed(outputs: Any, targets: Tensor) -> Tensor:
        return given(outputs, targets)

    computed.__name__ = name
    loss(text, WithLoss)(computed)


def error(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def norm_of(parameters: Any) -> Tensor:
    return torch.stack([each.grad.norm() for each in parameters]).norm()


def train_with(script: Script, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
    script.print(getattr(optimizer, "steps", 0))


def script_state(script: Script, part: Any) -> dict[str, Any]:
    return {} if script.body == "plain" else {"state": {"part": part}}
