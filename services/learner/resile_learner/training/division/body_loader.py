"""The loader of a loop whose body runs once for each batch: it yields whole batches, and drives a `BodyRun`."""

import gc
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from resile_shared.errors import UsageError

from ...session import closed_at_exit, current_session
from ..backward import observed_backward
from ..data.batches import Position
from ..data.data_loader import read_loader
from ..data.fetch import Fetcher
from ..data.stream_reader import is_stream
from ..leaving import Departure
from ..reports import Result
from ..seeds import mix, seed_all, seeded
from ..settings import TrainingSettings
from .body_run import BodyIteration, BodyRun
from .reading import keys_from, plan_bodies
from .variables import LoopVariables


class BodyLoader:
    """A loader whose batches are those of the loader that `prepare` was given. Made by `prepare`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: DataLoader[Any],
        settings: TrainingSettings,
        *,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        read = read_loader(loader)
        self._loader = loader
        self.dataset = read.dataset
        self.batch_size = read.batch_size
        self.sync_gradients = True
        """Every backward pass is that of the whole batch."""
        self._model = model
        self._optimizers = optimizers
        self._grad_scaler = grad_scaler
        self._settings = replace(read.applied_to(settings), batch_size=read.batch_size or 1)
        self._plan = None if is_stream(read.dataset) else plan_bodies(read.dataset, self._settings)
        held = [each for module in model.modules() for each in getattr(module, "holds", ())]
        known = [model, *optimizers, *settings.state.values(), *held, self]
        self._variables = LoopVariables(
            known, read.dataset, lambda message: self._started.warn(message), lambda: self._started.models_in_full
        )
        self._departure = Departure(
            model,
            loop="loader.epochs()",
            owner="loader",
            held=None,
        )
        self._run: BodyRun | None = None
        self._iterations: Iterator[BodyIteration]
        self._iteration: BodyIteration | None = None
        self._is_fresh = False
        """Whether no batch of the open iteration was yielded yet."""
        self._is_used = False
        """Whether the script has begun its loop over the batches of the epoch."""

    def __getattr__(self, name: str) -> Any:
        """What else a DataLoader has, such as its sampler, is that of the one that `prepare` was given."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def epochs(self, num_epochs: int, *, start: int = 0) -> Iterator[int]:
        """Train for ``num_epochs`` passes over the dataset; yields their numbers, from the one under way.

        The first one is ``start``: ``epochs(10, start=1)`` replaces ``range(1, 11)``.
        """
        return _Asked(closed_at_exit(self._epochs(num_epochs, start)), self._variables, is_outermost=True)

    def _epochs(self, num_epochs: int, start: int) -> Generator[int, None, None]:
        if self._run:
            raise UsageError("loader.epochs() was called twice: a script has one training call; name all epochs in one")
        settings = replace(self._settings, epochs=num_epochs)
        self._run = BodyRun(self._model, self._optimizers, self.dataset, settings, variables=self._variables)
        self._iterations = closed_at_exit(self._run.iterations())
        self._advance()
        current_session().prepared = self
        num_samples = None if self._plan is None else len(self.dataset)
        while self._iteration is not None:
            opened = self._iteration
            self._is_used = False
            seed_all(mix(settings.seed, "start of epoch", opened.epoch))
            if opened.begins_epoch:
                self._run.begin_script()
            try:
                yield start + opened.epoch
            except GeneratorExit:  # `break`, `return` or an error: a generator cannot tell which
                self._departure.leave()
                raise
            if self._is_fresh:
                raise UsageError(
                    "an epoch ended without a loop over the loader: loop once in each epoch over the loader that "
                    "prepare() has returned, and not over the one that it was given"
                )
            if num_samples is not None and len(self.dataset) != num_samples:
                raise UsageError(
                    f"the dataset has {len(self.dataset)} samples now, and had {num_samples} when training began, with "
                    "which the iterations were counted: make it as long as it will be, and draw what an epoch "
                    "uses by a sampler"
                )
            self._run.end_epoch()
            self._advance()

    def complete_if_left(self) -> None:
        """See `PreparedLoop`."""
        if self._departure.has_left:
            self.complete()

    def complete(self) -> None:
        """See `PreparedLoop`."""
        if self._iteration is None:
            return
        self._departure.begin_completion()
        if self._is_fresh:
            self._started.stop_before()
        else:
            self._started.stop()
        self._advance()
        self._departure.close()

    @property
    def missing_gradients(self) -> str:
        """See `PreparedLoop`: each backward pass leaves gradients."""
        return ""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches to train with; while or after that is done in an epoch, over all, to evaluate."""
        if self._run is None:
            raise UsageError(
                "the prepared loader was used before loader.epochs(): write `for epoch in loader.epochs(10):` around "
                "the loop over it"
            )
        self.complete_if_left()
        if self._iteration is None or self._is_used:
            return self._read_through()
        self._is_used = True
        return _Asked(closed_at_exit(self._whole_batches()), self._variables, num_before=self._iteration.num_before)

    def _read_through(self) -> Iterator[Any]:
        """The batches of the loader once more, in the order of the epoch under way, or else in that of the first."""
        if self._plan is None:
            raise UsageError(
                "the prepared loader of a stream was used a second time in an epoch, or after training: make another "
                "DataLoader to evaluate"
            )
        fetcher = Fetcher(self.dataset, seed=self._settings.seed, collate_fn=self._settings.collate_fn)
        epoch = 0 if self._iteration is None else self._iteration.epoch
        for key in keys_from(self._plan, Position(epoch, 0)):
            with seeded(0):
                batch = fetcher.read(key).batch
            yield batch

    def _whole_batches(self) -> Generator[Any, None, None]:
        assert self._iteration is not None
        epoch = self._iteration.epoch
        with observed_backward(self._note_loss):
            while self._iteration is not None and self._iteration.epoch == epoch:
                self._is_fresh = False
                self._started.begin_script()
                data = self._iteration.samples.data
                self._started.begin_body()
                yield data
                if self._iteration.ends_epoch or self._iteration.number + 1 == self.iterations_total:
                    break
                self._advance()
        seed_all(mix(self._settings.seed, "epoch", epoch))

    def __len__(self) -> int:
        """The number of batches of an epoch. Raises TypeError for a stream."""
        if self._plan is None:
            raise TypeError("the loader of a stream has no length")
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
        self.complete_if_left()
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

    def _note_loss(self, loss: Tensor) -> None:
        if self._iteration is not None:
            scale = self._grad_scaler.get_scale() if self._grad_scaler else 1.0
            self._iteration.loss = float(loss.detach()) / scale


class _Asked(Iterator[Any]):
    """What the loader yields, and the place in the script where it is asked for.

    ``num_before`` is how many batches of the epoch were trained before this worker began with it: ``enumerate`` and
    ``zip`` go on from there.
    """

    def __init__(
        self, yielded: Iterator[Any], variables: LoopVariables, *, is_outermost: bool = False, num_before: int = 0
    ) -> None:
        self._yielded = yielded
        self._variables = variables
        self._is_outermost = is_outermost
        self._num_before = num_before
        self._num_skipped = 0

    def __next__(self) -> Any:
        if self._num_skipped:
            self._num_skipped -= 1
            return None
        num_before, self._num_before = self._num_before, 0
        if num_before and (counting := _counting(self)) is not None:
            self._num_skipped = num_before
            for _ in range(num_before):
                next(counting)
        elif num_before and _is_counted_around(sys._getframe(1)):
            self._variables.warn(_COUNTED_AROUND)
        with self._variables.seen_from(sys._getframe(1), is_outermost=self._is_outermost):
            return next(self._yielded)


def _counting(batches: _Asked) -> Any:
    """The outermost ``enumerate`` or ``zip`` over ``batches``; None if there is none.

    They take a batch before they count, or take what belongs to it: so within that they can be made to skip.
    """
    found, inner = None, _wrapper(batches)
    while inner is not None:
        found, inner = inner, _wrapper(inner)
    return found


def _is_counted_around(caller: FrameType) -> bool:
    """Whether ``caller`` is a generator within ``enumerate`` or ``zip``, which cannot be made to skip while it runs."""
    running = [each for each in gc.get_objects() if type(each) is GeneratorType and each.gi_frame is caller]
    around = [each for generator in running for each in gc.get_referrers(generator)]
    within_zips = [other for each in around if type(each) is tuple for other in gc.get_referrers(each)]
    return any(type(each) in (enumerate, zip) for each in (*around, *within_zips))


_COUNTED_AROUND = (
    "enumerate() or zip() is around a generator that goes through the loader, as in `enumerate(tqdm(loader))` or "
    "`enumerate(logger.log_every(loader))`, so that it begins with 0 where training goes on within an epoch: count by "
    "loader.iteration, or put enumerate() around the loader itself"
)


def _wrapper(iterator: object) -> Any:
    for each in gc.get_referrers(iterator):
        if type(each) is enumerate:
            return each
        if type(each) is tuple and each[0] is iterator:  # what a zip goes through
            return next((other for other in gc.get_referrers(each) if type(other) is zip), None)
    return None
