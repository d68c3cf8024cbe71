"""The loader of a loop whose body runs once for each batch: it yields whole batches, and drives a `BodyRun`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from resile_shared.errors import UsageError

from ...session import current_session
from ..backward import Backward, handled_backward
from ..data.data_loader import read_loader
from ..reports import Result
from ..seeds import mix, seed_all
from ..settings import TrainingSettings
from .body_run import BodyIteration, BodyRun, plan_bodies


class BodyLoader:
    """A loader whose batches are those of the loader that `prepare` was given. Made by `prepare`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: DataLoader[Any],
        settings: TrainingSettings,
    ) -> None:
        read = read_loader(loader)
        self.dataset = read.dataset
        self.batch_size = read.batch_size
        self.sync_gradients = True
        """Every backward pass is that of the whole batch."""
        self._model = model
        self._optimizers = optimizers
        self._settings = replace(read.applied_to(settings), batch_size=read.batch_size or 1)
        self._plan = plan_bodies(read.dataset, self._settings)
        self._run: BodyRun | None = None
        self._iterations: Iterator[BodyIteration]
        self._iteration: BodyIteration | None = None
        self._is_fresh = False

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Train for ``num_epochs`` passes over the dataset; yields their numbers, from the one under way."""
        if self._run:
            raise UsageError("loader.epochs() was called twice: a script has one training call; name all epochs in one")
        settings = replace(self._settings, epochs=num_epochs)
        self._run = BodyRun(self._model, self._optimizers, self.dataset, settings)
        self._iterations = self._run.iterations()
        self._advance()
        while self._iteration is not None:
            opened = self._iteration
            seed_all(mix(settings.seed, "start of epoch", opened.epoch))
            yield opened.epoch
            if self._is_fresh:
                raise UsageError("an epoch ended without a loop over the loader: loop over it once in each epoch")
            self._advance()

    def __iter__(self) -> Iterator[Any]:
        if self._iteration is None:
            raise UsageError("the prepared loader was used outside of loader.epochs()")
        epoch = self._iteration.epoch
        with handled_backward(self._backward):
            while self._iteration is not None and self._iteration.epoch == epoch:
                self._is_fresh = False
                self._started.begin_body()
                yield self._iteration.data
                if self._iteration.ends_epoch or self._iteration.number + 1 == self.iterations_total:
                    break
                self._advance()
        seed_all(mix(self._settings.seed, "epoch", epoch))

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return self._plan.per_epoch

    @property
    def iteration(self) -> int:
        """The number of the iteration under way, from 0."""
        return self._started.iteration

    @property
    def iterations_total(self) -> int:
        """The number of iterations after which the run ends."""
        return self._started.iterations_total

    @property
    def loss(self) -> float | None:
        """The newest loss that had its backward pass, of the whole batch; None before the first."""
        if self._iteration is not None and self._iteration.loss is not None:
            return self._iteration.loss
        return self._started.state.progress.loss

    @property
    def is_lowest_rank(self) -> bool:
        """Whether this worker is, at the moment, the one that should print and write files."""
        return current_session().view.rank == 0

    @property
    def result(self) -> Result | None:
        """How the run ended; None before its end."""
        return self._started.result

    def stop(self) -> None:
        """End the run after this iteration, on all workers."""
        self._started.stop()

    @property
    def _started(self) -> BodyRun:
        if self._run is None:
            raise UsageError("training has not begun: this is known from loader.epochs() on")
        return self._run

    def _advance(self) -> None:
        self._iteration = next(self._iterations, None)
        self._is_fresh = True

    def _backward(self, loss: Tensor, run: Backward) -> None:
        if self._iteration is not None:
            self._iteration.loss = float(loss.detach())
        run(loss)
