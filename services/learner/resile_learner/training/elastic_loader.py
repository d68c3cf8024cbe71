"""The loader of an ordinary loop: it yields the shards of this worker, and drives a `Run`.

Made by `prepare`; what each line of a loop's body does is in docs/elastic-training.md.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from resile_shared.errors import UsageError

from ..collectives.spec import OtherRound
from ..session import LEFT_EARLY, closed_at_exit, current_session
from .backward import Backward, handled_backward
from .clipping import clipping_without_gradients
from .closures import Closure, Step, StepBackup, SuspendedStep, check_value
from .data.accumulation import cut_batch
from .data.batches import BatchPlan
from .data.data_loader import read_loader
from .data.sources import check_stream, plan_batches
from .data.stream_reader import is_stream
from .iteration import EvaluationAbandoned, Iteration
from .leaving import Departure
from .reports import Result
from .run import Run
from .seeds import mix, seed_all
from .settings import TrainingSettings
from .watch.losses import check_not_divided
from .watch.optimizer_watch import WITHOUT_SHARDS, SteppedWithinBackward, is_within_backward

_OUTSIDE = (
    "the prepared loader was used outside of loader.epochs(): write `for epoch in loader.epochs(10):` around the loop "
    "over the loader, so that a worker that joins later begins in the epoch under way"
)
_ANOTHER = (
    "To evaluate, or for torch.optim.swa_utils.update_bn, use another DataLoader, such as the one that prepare() was "
    "given"
)
_SECOND_PASS = (
    f"the prepared loader was iterated a second time in one epoch, but trains once in each. {_ANOTHER}. To train "
    "longer, name more epochs in loader.epochs()"
)
_SOME_STEPS = (
    "optimizer.step() was called in some batches of an iteration and not in others: batches are shards of a global "
    "batch here, whose gradients are summed before the step. Call it in every batch (it acts once an iteration), and "
    "accumulate gradients by accumulate=... of prepare(), or let the body run once for each batch of the loader, by "
    'prepare(..., body="batch")'
)
_COMPLETE = f"the prepared loader was used after training was complete, when it has no more batches. {_ANOTHER}"

_TWICE = (
    f"For an optimizer that needs gradients twice, such as SAM, {WITHOUT_SHARDS}, or let it evaluate the closure of "
    "`optimizer.step(closure)` for each of them"
)


class ElasticLoader:
    """A loader whose batches are the shards that this worker computes. Made by `prepare`.

    An iteration is committed when the loop asks for what follows: another batch, or another epoch. So what a script
    does at the end of an epoch still belongs to the epoch's last iteration, and is part of what a joiner receives.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: DataLoader[Any],
        settings: TrainingSettings,
        *,
        accumulate: int | None,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        read = read_loader(loader)
        self.dataset = read.dataset
        self.batch_size = read.batch_size
        """The batch size of the loader that `prepare` was given; None with a batch sampler."""
        self._model = model
        self._optimizers = optimizers
        self._grad_scaler = grad_scaler
        if grad_scaler is not None and len(optimizers) > 1:
            raise UsageError("prepare() was given a GradScaler and several optimizers: use torch.bfloat16 without it")
        self._accumulate = accumulate or 1
        batch_size, num_shards = cut_batch(read.batch_size, accumulate, settings.num_shards)
        micro_batch_size = settings.micro_batch_size
        if accumulate is not None and settings.is_fast and micro_batch_size is None:
            micro_batch_size = read.batch_size
        self._settings = replace(
            read.applied_to(settings),
            batch_size=batch_size,
            num_shards=num_shards,
            micro_batch_size=micro_batch_size,
            weighs_by_samples=accumulate is not None,
        )
        self._plan: BatchPlan | None = None
        if is_stream(read.dataset):
            check_stream(drop_last=read.drop_last, num_workers=read.num_workers)
        else:
            self._plan = plan_batches(read.dataset, self._settings)
        self._started: Run | None = None
        self._iterations: Iterator[Iteration]
        self._iteration: Iteration | None = None
        self._is_fresh = False
        """Whether no batch of the open iteration was yielded yet."""
        self._batch_loss: float | None = None
        """The newest loss that had its backward pass in a closure."""
        self._num_losses = 0
        """How many losses of the newest batch have had their backward pass."""
        self._steps: list[bool] = []
        """Whether the optimizer was stepped in each batch of the open iteration that does not complete it."""
        self._is_between_epochs = False
        """Whether the script runs its code at the end or at the start of an epoch."""
        self._is_behind = False
        """Whether the script runs its code at the end of an epoch after others have, starting from what they had."""
        self._epoch: int | None = None
        """The epoch that `epochs` has yielded."""
        self._is_used = False
        """Whether the script has begun its loop over the batches of the epoch."""
        self._departure = Departure(
            model,
            loop="loader.epochs()",
            owner="loader",
            held="`bar = tqdm(loader.epochs(10))`: write `for epoch in tqdm(loader.epochs(10)):`",
        )
        self._step: tuple[SuspendedStep, StepBackup] | None = None
        """The step of an optimizer whose closure the batches of the iteration evaluate, and its backup."""
        self._refusal: UsageError | None = None

    def epochs(self, num_epochs: int, *, start: int = 0) -> Iterator[int]:
        """Train for ``num_epochs`` passes over the dataset; yields their numbers, from the one under way.

        The first one is ``start``: ``epochs(10, start=1)`` replaces ``range(1, 11)``.

        The run is complete when this has ended. A script that leaves it by ``break``, on all workers after the same
        iteration, ends the run there: it is complete when the script next uses this loader, or ends. Raises UsageError
        for settings that cannot work, and for an epoch that was left early.
        """
        return closed_at_exit(self._epochs(num_epochs, start))

    def _epochs(self, num_epochs: int, start: int) -> Generator[int, None, None]:
        if self._started:
            raise UsageError("loader.epochs() was called twice: a script has one training call; name all epochs in one")
        settings = replace(self._settings, epochs=num_epochs)
        self._started = Run(self._model, self._optimizers, self.dataset, settings, has_epochs=True)
        self._iterations = closed_at_exit(self._started.iterations())
        self._advance()
        self._is_between_epochs = True
        current_session().prepared = self
        while self._iteration is not None:
            opened = self._iteration
            self._is_used, self._epoch = False, opened.epoch
            # As on a worker that begins in this epoch.
            seed_all(mix(self._settings.seed, "start of epoch", opened.epoch))
            try:
                yield start + opened.epoch
            except GeneratorExit:  # `break`, `return` or an error: a generator cannot tell which
                if self._is_behind:
                    self._started.received.end_epoch()
                self._departure.leave()
                raise
            self._is_behind = False
            self._raise_refusal()
            if self._is_fresh:  # opened in a recovery at the end of the epoch, or never used
                self._check_used(opened)
                self._started.received.end_epoch()
            else:
                self._check_not_left()
                self._advance()
        self._is_between_epochs = False

    def complete_if_left(self) -> None:
        """See `PreparedLoop`."""
        if self._departure.has_left and (self._is_fresh or self.sync_gradients):
            self.complete()

    def complete(self) -> None:
        """See `PreparedLoop`."""
        self._is_behind = False
        self._raise_refusal()
        if self._iteration is None:
            return
        self._departure.begin_completion()
        if self._is_fresh:
            self._run.stop_before()
        elif self.sync_gradients:
            self._run.stop()
        else:
            raise UsageError(
                f"the loop over the loader was left in the middle of iteration {self._iteration.number}, where each "
                "worker has seen other batches: write `if loader.sync_gradients and loader.loss < 0.01:` before `break`"
                ", so that all workers leave it at the same iteration, by the loss of the whole global batch"
            )
        self._advance()
        self._departure.close()
        if self._iteration is not None:  # a member that has not left the loop handed its state over in a recovery
            raise OtherRound("another worker")
        if self._run.result is None:
            raise UsageError(LEFT_EARLY)

    def __iter__(self) -> Iterator[Any]:
        return closed_at_exit(self._pass())

    def _pass(self) -> Generator[Any, None, None]:
        self.complete_if_left()
        if self._iteration is None:
            raise UsageError(_COMPLETE if self._started else _OUTSIDE)
        if self._is_used:
            raise self.remember(UsageError(_SECOND_PASS))
        self._is_used = True
        epoch = self._iteration.epoch
        self._is_between_epochs = False
        while self._iteration is not None and self._iteration.epoch == epoch:
            yield from self._batches(self._iteration)
            if self.sync_gradients and self._is_last():
                break
            self._advance()
        self._is_between_epochs = True
        self._is_behind = self._is_fresh  # its state is that of workers which have run what follows in the script
        self._run.received.begin_epoch_end(is_behind=self._is_behind)
        seed_all(mix(self._settings.seed, "epoch", epoch))  # what follows in the script draws alike on all workers

    def __len__(self) -> int:
        """The number of batches that this worker is given in an epoch, with as many workers as there are now.

        Raises TypeError for a stream.
        """
        if self._plan is None:
            raise TypeError("the loader of a stream has no length")
        rank, size = 0, 1
        if self._started:
            view = current_session().view
            rank, size = view.rank, view.size
        plan = self._started.plan if self._started else self._plan
        batches = [
            plan.batch(plan.position(number), num_workers=size if self._settings.is_fast else None)
            for number in (0, plan.per_epoch - 1)
        ]
        usual, last = (max(1, len(range(*batch.held_by(rank, size)))) for batch in batches)
        return ((plan.per_epoch - 1) * usual + last) * len(self._optimizers)

    @property
    def missing_gradients(self) -> str:
        """See `PreparedLoop`."""
        if not self._num_losses or self._iteration is None or self._is_exchanged:
            return ""
        return (
            "a prepared loop has gradients once an iteration, after the backward pass of its last batch: write "
            f"`if loader.sync_gradients:` before the lines that use them. {_TWICE}"
        )

    @property
    def sync_gradients(self) -> bool:
        """Whether the gradients are those of a whole global batch: after the backward pass of its last shard here.

        Check it for code that belongs to an iteration, not to a shard. With several optimizers it is true once a batch,
        after the exchange of the last of them.
        """
        return self._is_behind or (self._is_exchanged and self._iteration is not None and self._iteration.is_last_turn)

    @property
    def _is_exchanged(self) -> bool:
        return self._iteration is not None and self._iteration.is_exchanged

    def step_with_closure(self, step: Step, closure: Closure) -> Any:
        """Evaluate ``closure`` for the current batch; after the last one here the optimizer's own ``step`` goes on.

        Returns the loss of the batch or, once ``step`` is complete, what that returns. Raises UsageError.
        """
        if self._iteration is None:
            return None
        try:
            return self._evaluate(self._iteration, step, closure)
        except UsageError as error:
            raise self.remember(error) from None

    def _evaluate(self, iteration: Iteration, step: Step, closure: Closure) -> Any:
        self._check_closure()
        if self._step is None:
            backup = self._run.closures.begin(self._optimizers[0])
            self._step = SuspendedStep(step), backup
            if not self._step[0].needs_value():
                iteration.end_closure()  # refuses a step without an evaluation
        suspended, backup = self._step
        self._batch_loss = None
        try:
            value = closure()
        except EvaluationAbandoned:
            value = None
        if iteration.lost:
            self._cancel_step()
            backup.restore()
            return None
        check_value(value, self._batch_loss)
        if iteration.outcome is None:
            return value
        suspended.give(torch.tensor(iteration.loss, dtype=torch.float64))
        if suspended.needs_value():
            return value
        self._step = None
        iteration.end_closure()
        return suspended.result

    def _check_closure(self) -> None:
        if self._is_between_epochs or self._num_losses:
            raise UsageError(
                "optimizer.step(closure) was called outside of a batch, twice in a batch, or after backward(): call it "
                "once for each batch of the loader, and backward() in the closure alone"
            )
        if len(self._optimizers) > 1 or self._grad_scaler is not None:
            raise UsageError(
                "optimizer.step(closure) was called in a loop with several optimizers or a GradScaler: use one "
                "optimizer, and torch.bfloat16 without a GradScaler"
            )

    def _cancel_step(self) -> None:
        if self._step is not None:
            self._step[0].cancel()
            self._step = None

    def may_step(self, turn: int) -> bool:
        """Whether a step of optimizer number ``turn`` acts now. Raises UsageError if it comes before its loss."""
        if self._iteration is None:
            return False
        if is_within_backward():
            raise self.remember(SteppedWithinBackward())
        if len(self._optimizers) > 1 and not self._is_between_epochs and self._num_losses != turn + 1:
            raise self.remember(
                UsageError(
                    f"optimizer number {turn} was stepped after {self._num_losses} backward passes in a batch: call "
                    "backward() once for each optimizer, before its step, with the sum of its losses, as in "
                    "`(loss_real + loss_fake).backward()`, and give prepare() the optimizers in the order in which the "
                    "body steps them"
                )
            )
        if self._steps:
            self._steps[-1] = True
        return self._is_exchanged and self._iteration.turn == turn

    def may_step_schedule(self, turn: int) -> bool:
        """Whether a step of the schedule of optimizer number ``turn`` acts now."""
        is_turn = self._iteration is not None and self._iteration.turn == turn
        return self._is_between_epochs or (self._is_exchanged and is_turn)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that ``epochs()`` has yielded; after the end that of the last iteration."""
        newest = self._run.epoch
        return newest if self._epoch is None else self._epoch

    @property
    def iteration(self) -> int:
        """Iterations committed so far: the number of the one under way."""
        return self._run.iteration - self._is_behind

    @property
    def iterations_total(self) -> int:
        """The number of iterations after which the run ends."""
        return self._run.iterations_total

    @property
    def loss(self) -> float | None:
        """The loss of the newest global batch whose gradients were exchanged; None before the first."""
        if self._iteration is not None and self._iteration.loss is not None:
            return self._iteration.loss
        return self._run.state.progress.loss

    @property
    def is_lowest_rank(self) -> bool:
        """Whether this worker is, at the moment, the one that should print and write files."""
        return self._run.session.view.rank == 0

    @property
    def result(self) -> Result | None:
        """How the run ended; None before its end."""
        return self._run.result

    def stop(self) -> None:
        """End the run after this iteration: see `ElasticLoop.stop`.

        Raises UsageError in a batch that does not complete the iteration.
        """
        run = self._run
        if not (
            self._is_fresh
            or self._is_between_epochs
            or self.sync_gradients
            or self._iteration is None
            or self._iteration.lost
        ):
            raise self.remember(
                UsageError(
                    f"loader.stop() was called in the middle of iteration {run.iteration}, where each worker has seen "
                    "other batches: write `if loader.sync_gradients and loader.loss < 0.01:` before it, so that all "
                    "workers stop at the same iteration, by the loss of the whole global batch"
                )
            )
        run.stop()

    def remember(self, refusal: UsageError) -> UsageError:
        """Return ``refusal``, to be raised; if the script catches it, it is raised again when the batch ends."""
        self._refusal = self._refusal or refusal
        return refusal

    def _raise_refusal(self) -> None:
        if self._refusal:
            raise self._refusal
        if self._iteration:
            self._iteration.raise_refusal()

    @property
    def _run(self) -> Run:
        if self._started is None:
            raise UsageError("training has not begun: this is known from loader.epochs() on")
        self.complete_if_left()
        return self._started

    def _advance(self) -> None:
        """Commit the open iteration, and open the next one: None at the end of the run."""
        self._iteration = next(self._iterations, None)
        self._is_fresh = True

    def _is_last(self) -> bool:
        """Whether the open iteration is the last one of its epoch, or of the run."""
        assert self._iteration is not None
        return self._iteration.ends_epoch or self._iteration.number + 1 == self.iterations_total

    def _batches(self, iteration: Iteration) -> Iterator[Any]:
        try:
            yield from self._evaluated(iteration)
            while iteration.evaluate_again():
                yield from self._evaluated(iteration)
        finally:
            self._cancel_step()

    def _evaluated(self, iteration: Iteration) -> Iterator[Any]:
        self._steps = []
        for batch in iteration.shards() if iteration.num_held else iteration.spare_shard():
            self._is_fresh, self._num_losses = False, 0
            self._steps.append(False)
            with handled_backward(partial(self._backward, iteration)), clipping_without_gradients():
                yield batch
            self._raise_refusal()
            if iteration.turn < len(self._optimizers) - 1:
                iteration.restore_buffers()
            if not self._num_losses:
                raise UsageError(
                    "a batch ended without loss.backward(): every batch of a prepared loader counts; call it once for "
                    "each, with a loss of `0 * loss` for a batch that should not count. Gradients that the body "
                    f"computes by torch.autograd.grad are not exchanged: to train with them, {WITHOUT_SHARDS}, and "
                    "call the model in `with resile.training.undivided():`"
                )
            if self._num_losses < len(self._optimizers):
                raise UsageError(
                    f"a batch ended after {self._num_losses} of {len(self._optimizers)} backward passes: call "
                    "backward() once for each optimizer, in the order of their steps; optimizers that share a loss "
                    "can be one optimizer with several parameter groups"
                )
            if not iteration.is_exchanged and len(set(self._steps)) > 1:
                raise UsageError(_SOME_STEPS)

    def _backward(self, iteration: Iteration, loss: Tensor, run: Backward) -> None:
        turn, self._num_losses = self._num_losses, self._num_losses + 1
        if turn >= len(self._optimizers):
            times = "twice" if turn == 1 else f"{turn + 1} times"
            raise self.remember(
                UsageError(
                    f"backward() was called {times} for a batch: call it once for each optimizer, with the sum of its "
                    "losses, as in `(loss_real + loss_fake).backward()`, and use torch.autograd.grad for gradients of "
                    f"anything else. {_TWICE}"
                )
            )
        if turn != iteration.turn:
            return  # the loss of another turn with this batch
        check_not_divided(loss, accumulate=self._accumulate)
        value = loss.detach() if self._grad_scaler is None else loss.detach() / self._grad_scaler.get_scale()
        self._batch_loss = float(value) if self._step else None
        iteration.compute(loss, run, {"loss": value}, allows_nan=self._grad_scaler is not None)
        if iteration.is_computed:
            iteration.exchange()

    def _check_used(self, opened: Iteration) -> None:
        if self._iteration is opened:
            raise UsageError(
                "an epoch ended without a loop over the loader: loop over it once in each epoch, as in "
                "`for batch in loader:`"
            )

    def _check_not_left(self) -> None:
        assert self._iteration is not None
        if self._iteration.lost is None and not (self.sync_gradients and self._is_last()):
            raise UsageError(
                f"the loop over the loader was left at iteration {self._iteration.number}, before the end of epoch "
                f"{self._iteration.epoch}: to end training early, also leave the loop over loader.epochs(), or call "
                "loader.stop() instead of `break`, at the same iteration on all workers; to use fewer batches in each "
                "epoch, give prepare() a DataLoader of a torch.utils.data.Subset, or with a sampler that draws fewer "
                "samples"
            )
