"""The interface of IBM's Elastic Distributed Training as a script sees it, for one engine."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader


class FabricModel:
    def __init__(self, model: Any, datasets_function: Callable[[], Any], loss_function: Any, optimizer: Any) -> None:
        self.model, self.datasets, self.loss_function, self.optimizer = (
            model,
            datasets_function,
            loss_function,
            optimizer,
        )

    def train(self, epochs: int, batch_size: int, engines_number: int) -> None:
        training, _ = self.datasets()
        for _ in range(epochs):
            for x, y in DataLoader(training, batch_size=batch_size * engines_number, shuffle=True):
                self.optimizer.zero_grad()
                self.loss_function(self.model(x), y).backward()
                self.optimizer.step()
