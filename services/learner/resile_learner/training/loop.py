"""The hand-written loop: the user's own training step, made elastic.

It reads as any training loop does::

    loop = ElasticLoop(model, optimizer, dataset, epochs=3, batch_size=192)
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(F.cross_entropy(model(inputs), targets))
        if iteration.exchange():
            optimizer.step()
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from resile_shared.errors import UsageError

from ..collectives.spec import OtherRound
from ..session import LEFT_EARLY, closed_at_exit, current_session
from .data.batch_samplers import BatchSampler
from .data.batches import BatchPlan
from .data.fetch import Collate
from .data.samplers import Sampler
from .iteration import Iteration
from .learning_rate import LearningRateRule
from .leaving import Departure
from .reports import Result
from .run import Run
from .settings import Mode, TrainingSettings
from .validation import Validation


class ElasticLoop:
    """Iterates over the committed iterations of a run, on however many workers it has at the moment.

    ``dataset`` is map-style, or a stream: an iterable (see `StreamReader`). ``batch_size`` is the global batch, always
    cut into ``num_shards`` shards (None: see `default_num_shards`). ``batch_range``, the least and the most samples,
    lets the pool change the global batch between iterations; ``learning_rate_rule`` says how learning rates follow it
    ("linear", "sqrt" or "none"), relative to ``batch_size``. In fast mode ``micro_batch_size`` is the most samples of
    one forward and backward pass: a worker computes a larger share of the batch in several. ``state`` names further
    objects with ``state_dict`` and ``load_state_dict`` that belong to the run's state, such as a learning-rate schedule
    or a GradScaler. ``validation`` is computed at the end of each epoch. ``checkpoint_every`` counts iterations, or is
    a time such as "5 min". ``threads`` are torch's threads in each worker. Without ``shuffle`` every epoch has the
    order of the dataset; ``drop_last`` leaves out samples that do not fill a global batch. ``sampler`` draws the
    indices of each epoch instead (see `SamplerOrder`), ``batch_sampler`` those of each global batch, whatever their
    number (see `BatchOrder`). ``max_iterations`` ends the run earlier than ``epochs`` do. A loss that is a weighted
    mean, as ``cross_entropy`` is with weights of classes or ignored targets, becomes that of the global batch; with
    ``weighs_by_samples`` it is the mean of the shards' means. Raises UsageError for settings that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        dataset: Any,
        *,
        epochs: int = 1,
        batch_size: int = 64,
        batch_range: tuple[int, int] | None = None,
        learning_rate_rule: LearningRateRule = "linear",
        num_shards: int | None = None,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        validation: Validation | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        checkpoint_every: int | str | None = None,
        mode: Mode = "same-bits",
        micro_batch_size: int | None = None,
        threads: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Sampler | None = None,
        batch_sampler: BatchSampler | None = None,
        max_iterations: int | None = None,
        weighs_by_samples: bool = False,
    ) -> None:
        settings = TrainingSettings(
            epochs=epochs,
            batch_size=batch_size,
            batch_range=batch_range,
            learning_rate_rule=learning_rate_rule,
            num_shards=num_shards,
            seed=seed,
            state=state or {},
            validation=validation,
            collate_fn=collate_fn,
            num_workers=num_workers,
            checkpoint_every=checkpoint_every,
            mode=mode,
            micro_batch_size=micro_batch_size,
            threads=threads,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            max_iterations=max_iterations,
            weighs_by_samples=weighs_by_samples,
        )
        optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        self.run = Run(model, optimizers, dataset, settings)
        self._left: Iterator[Iteration]
        """The iterations that follow once the script has left the loop."""
        self._departure = Departure(
            model, loop="the iterations", owner="loop", held="`it = iter(loop)`: write `for iteration in loop:`"
        )

    @property
    def plan(self) -> BatchPlan:
        """The batches of an epoch."""
        return self.run.plan

    @property
    def epochs(self) -> int:
        """The number of passes over the dataset."""
        return self.run.settings.epochs

    @property
    def iteration(self) -> int:
        """Iterations committed so far: the number of the next one."""
        return self.run.iteration

    @property
    def iterations_total(self) -> int:
        """The number of iterations after which the run ends; an estimate if the batch may change."""
        return self.run.iterations_total

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the open iteration; between iterations and after the end, that of the newest one."""
        return self.run.epoch

    @property
    def loss(self) -> float | None:
        """The loss of the last committed iteration, over its global batch; None before the first."""
        return self.run.state.progress.loss

    @property
    def result(self) -> Result | None:
        """How the run ended; None before its end."""
        self.complete_if_left()
        return self.run.result

    @property
    def validation(self) -> Mapping[str, float]:
        """The scores of the last validation that was completed."""
        return self.run.state.progress.validation

    @property
    def is_lowest_rank(self) -> bool:
        """Whether this worker is, at the moment, the one that reports and writes files."""
        self.complete_if_left()
        return self.run.session.view.rank == 0

    def require_equal(self, **settings: object) -> None:
        """Before the loop: name further settings of the script that must be equal on all workers of the run."""
        self.run.require_equal(**settings)

    def stop(self) -> None:
        """End the run after this iteration. All workers must decide so at the same one.

        Judge by the reduced loss or metrics.
        """
        self.run.stop()

    @property
    def missing_gradients(self) -> str:
        """See `PreparedLoop`."""
        iteration = self.run.newest
        if iteration is None or not iteration.has_begun or iteration.is_exchanged:
            return ""
        return "an ElasticLoop has gradients after iteration.exchange(): write the lines that use them below it"

    def complete_if_left(self) -> None:
        """See `PreparedLoop`."""
        iteration = self.run.newest
        if self._departure.has_left and iteration and (not iteration.has_begun or iteration.is_complete):
            self.complete()

    def complete(self) -> None:
        """See `PreparedLoop`."""
        iteration = self.run.newest
        if self.run.result:
            return
        if iteration is None:
            raise UsageError(LEFT_EARLY)
        iteration.raise_refusal()
        if iteration.has_begun and not iteration.is_complete:
            raise UsageError(
                f"the loop was left in the middle of iteration {iteration.number}, where each worker has seen other "
                "batches: leave it after `if iteration.exchange(): optimizer.step()`, at the same iteration on all "
                "workers, by iteration.loss or another value of the whole global batch"
            )
        self._departure.begin_completion()
        if iteration.has_begun:
            self.run.stop()
        else:
            self.run.stop_before()
        following = next(self._left, None)
        self._departure.close()
        if following is not None:  # a member that has not left the loop handed its state over in a recovery
            raise OtherRound("another worker")

    def __iter__(self) -> Iterator[Iteration]:
        """Yield the iterations of the run. A script that leaves them by ``break`` ends the run: see `Departure`."""
        return closed_at_exit(self._yield_iterations())

    def _yield_iterations(self) -> Generator[Iteration, None, None]:
        self._left = self.iterations()
        current_session().prepared = self
        for iteration in self._left:
            try:
                yield iteration
            except GeneratorExit:
                self._departure.leave()
                raise

    def iterations(self) -> Iterator[Iteration]:
        """Yield the iterations for a loop that is not left before its end, such as that of a library with callbacks."""
        return closed_at_exit(self.run.iterations())
