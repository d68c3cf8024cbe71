"""The training call: a model, what it learns from, and how, trained on however many workers there are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from resile_shared.errors import UsageError

from .data.fetch import Collate
from .iteration import Iteration
from .learning_rate import LearningRateRule
from .loop import ElasticLoop
from .reports import Result
from .selection import Selection
from .settings import Mode
from .validation import Validation
from .watch.losses import check_is_mean
from .watch.schedules import check_made_for_iterations

Datasets = Callable[[], tuple[Any, Any]]
TARGETS = ("labels", "label", "targets", "target")
"""Names that the targets may have in a sample that is a dict."""
BatchFunction = Callable[[Any, Any], Tensor]


class Callback:
    """Called as training progresses, on the lowest rank only. Override the methods of interest.

    A callback must not change the model: only one worker runs it.
    """

    def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
        """An iteration's update was made.

        ``iteration.loss`` and ``iteration.metrics`` are those of the global batch.
        """

    def on_epoch(self, loop: ElasticLoop, epoch: int) -> None:
        """An epoch's last iteration was made; its validation, if any, comes next."""

    def on_validation(self, loop: ElasticLoop, epoch: int, scores: Mapping[str, float]) -> None:
        """The validation at the end of ``epoch`` is complete.

        The model is the one that has these scores. If the lowest rank changes just then, the call may be missing or
        come twice.
        """

    def on_end(self, loop: ElasticLoop, result: Result) -> None:
        """Training is complete."""


class ElasticModel:
    """A model that trains elastically.

    ``datasets`` is called once in each worker and returns a training dataset, and a map-style one for validation, or
    None. Samples are tuples of the model's inputs with the targets last, or dicts of its inputs by name with the
    targets under "labels", "label", "targets" or "target". ``loss_fn(outputs, targets)`` and each of ``metrics``
    return the mean over the batch; if the loss is a mean with weights of its own, ``loss_weight(outputs, targets)`` may
    return their sum, and is not needed for ``cross_entropy`` and the like. ``lr_scheduler`` steps once an iteration or,
    with ``lr_scheduler_interval="epoch"``, once an epoch; a ReduceLROnPlateau steps after each validation, with its
    score. ``autocast`` is a dtype for torch.autocast, such as torch.bfloat16; ``grad_scaler`` goes with torch.float16.
    After `train` the object has its ``result``, the ``scores`` of the final model, and whether this worker
    ``is_lowest_rank``, which should print and write files.
    """

    def __init__(
        self,
        model: nn.Module,
        datasets: Datasets,
        loss_fn: BatchFunction,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        metrics: Mapping[str, BatchFunction] | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        loss_weight: BatchFunction | None = None,
        lr_scheduler_interval: Literal["iteration", "epoch"] = "iteration",
        autocast: torch.dtype | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        threads: int = 1,
    ) -> None:
        self._model = model
        self._datasets = datasets
        self._loss_fn = loss_fn
        self._loss_weight = loss_weight
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._lr_scheduler_interval = lr_scheduler_interval
        self._metrics = dict(metrics or {})
        self._callbacks = list(callbacks)
        self._autocast = autocast
        self._grad_scaler = grad_scaler
        self._collate_fn = collate_fn
        self._num_workers = num_workers
        self._threads = threads
        self.result: Result | None = None
        self.is_lowest_rank = True
        self._loop: ElasticLoop
        if lr_scheduler_interval not in ("iteration", "epoch"):
            raise UsageError(f'lr_scheduler_interval is {lr_scheduler_interval!r}: use "iteration" or "epoch"')
        self._trained = False
        self._has_checked_loss = False

    def train(
        self,
        epochs: int = 1,
        batch_size: int = 64,
        *,
        num_shards: int | None = None,
        seed: int = 0,
        clip_grad_norm: float | None = None,
        checkpoint_every: int | str | None = None,
        mode: Mode = "same-bits",
        micro_batch_size: int | None = None,
        batch_range: tuple[int, int] | None = None,
        learning_rate_rule: LearningRateRule = "linear",
        selection: Selection | None = None,
    ) -> Result:
        """Train for ``epochs`` passes with a global batch of ``batch_size`` samples, on however many workers there are.

        The result's bits depend on code, data, seed, batch_size and num_shards alone, unless ``mode`` is "fast". In
        that mode ``micro_batch_size`` is the most samples of one forward and backward pass: see `ElasticLoop`.
        ``batch_range``, the least and the most samples, lets the pool change the batch between iterations; the bits
        then depend on the batches, which the result names. ``learning_rate_rule`` says how learning rates follow the
        batch, relative to ``batch_size``: "linear", "sqrt", or "none".
        ``clip_grad_norm`` is the largest norm of all gradients together. ``selection`` keeps the best model, and ends
        training early, by a score of the validation: "loss", or the name of a metric. Raises UsageError for settings
        that cannot work, NotANumber when the loss becomes NaN.
        """
        if self._trained:
            raise UsageError("train() was called twice: a script has one training call; raise `epochs` to train longer")
        self._trained = True
        training, data = self._load_datasets()
        validation = self._validation(data, selection)
        loop = ElasticLoop(
            self._model,
            self._optimizer,
            training,
            epochs=epochs,
            batch_size=batch_size,
            batch_range=batch_range,
            learning_rate_rule=learning_rate_rule,
            num_shards=num_shards,
            seed=seed,
            state=self._stateful(),
            validation=validation,
            collate_fn=self._collate_fn,
            num_workers=self._num_workers,
            checkpoint_every=checkpoint_every,
            mode=mode,
            micro_batch_size=micro_batch_size,
            threads=self._threads,
        )
        self._loop = loop
        loop.require_equal(
            clip_grad_norm=clip_grad_norm,
            autocast=self._autocast,
            lr_scheduler_interval=self._lr_scheduler_interval,
        )
        if self._lr_scheduler_interval == "iteration" and batch_range is None:
            check_made_for_iterations([self._lr_scheduler], epochs=epochs, iterations_total=loop.iterations_total)
        for iteration in loop.iterations():
            self._compute(iteration)
            if iteration.exchange():
                self._update(clip_grad_norm, ends_epoch=iteration.ends_epoch)
                self._call_back(loop, iteration)
        assert loop.result is not None
        self.result, self.is_lowest_rank = loop.result, loop.is_lowest_rank
        if loop.is_lowest_rank:
            for callback in self._callbacks:
                callback.on_end(loop, loop.result)
        return loop.result

    @property
    def scores(self) -> Mapping[str, float]:
        """The scores of the final model; empty without a validation, and before the end of `train`."""
        return self.result.validation if self.result else {}

    def _report_validation(self, scores: Mapping[str, float]) -> None:
        if self._loop.is_lowest_rank:
            for callback in self._callbacks:
                callback.on_validation(self._loop, self._loop.epoch, scores)

    def _load_datasets(self) -> tuple[Any, Any]:
        pair = self._datasets()
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UsageError(
                f"datasets() returned {type(pair).__name__}: return two things, the training dataset and the "
                "validation dataset or None"
            )
        return pair

    def _validation(self, dataset: Any, selection: Selection | None) -> Validation | None:
        scheduler = self._lr_scheduler
        plateaus = [scheduler] if isinstance(scheduler, ReduceLROnPlateau) else []
        if dataset is None and (selection or plateaus):
            needs = "a selection" if selection else "ReduceLROnPlateau"
            raise UsageError(
                f"{needs} judges by scores, and datasets() returned no validation dataset: return one as the second"
            )
        names = ["loss", *self._metrics]
        if selection and selection.score not in names:
            raise UsageError(f'the validation has no score "{selection.score}": choose one of {", ".join(names)}')
        if dataset is None:
            return None
        return Validation(
            dataset,
            self._scores,
            self._collate_fn,
            selection=selection,
            plateaus=plateaus,
            on_scores=self._report_validation,
        )

    def _stateful(self) -> dict[str, Any]:
        state = {"lr_scheduler": self._lr_scheduler, "grad_scaler": self._grad_scaler}
        return {name: part for name, part in state.items() if part is not None}

    def _compute(self, iteration: Iteration) -> None:
        self._model.train()
        for batch in iteration.shards():
            outputs, targets, loss = self._forward(self._model, batch)
            if not self._has_checked_loss:
                self._has_checked_loss = True
                check_is_mean(self._loss_fn, outputs, targets, loss)
            with torch.no_grad():
                metrics = {name: metric(outputs, targets) for name, metric in self._metrics.items()}
            weight = self._loss_weight(outputs, targets) if self._loss_weight else None
            iteration.backward(loss, scaler=self._grad_scaler, weight=weight, **metrics)

    def _forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any, Tensor]:
        arguments, named, targets = _split(batch)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        arguments, named, targets = _moved(arguments, device), _moved(named, device), _moved(targets, device)
        with torch.autocast(device.type, dtype=self._autocast, enabled=self._autocast is not None):
            outputs = model(*arguments, **named)
            return outputs, targets, self._loss_fn(outputs, targets)

    def _scores(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        outputs, targets, loss = self._forward(model, batch)
        return {"loss": loss, **{name: metric(outputs, targets) for name, metric in self._metrics.items()}}

    def _update(self, clip_grad_norm: float | None, *, ends_epoch: bool) -> None:
        scaler, optimizer = self._grad_scaler, self._optimizer
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), clip_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule = self._lr_scheduler
        is_due = ends_epoch or self._lr_scheduler_interval == "iteration"
        if schedule is not None and is_due and not isinstance(schedule, ReduceLROnPlateau):
            schedule.step()

    def _call_back(self, loop: ElasticLoop, iteration: Iteration) -> None:
        if not loop.is_lowest_rank:
            return
        for callback in self._callbacks:
            callback.on_iteration(loop, iteration)
            if iteration.ends_epoch:
                callback.on_epoch(loop, iteration.epoch)


def _split(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and named arguments of the model, and the targets. Raises UsageError."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return tuple(batch[:-1]), {}, batch[-1]
    if isinstance(batch, Mapping):
        name = next((name for name in TARGETS if name in batch), None)
        if name is not None and len(batch) >= 2:
            return (), {key: value for key, value in batch.items() if key != name}, batch[name]
    raise UsageError(
        "a sample of the dataset is neither a pair (input, target), nor a longer tuple with the target at last, nor a "
        f"dict with the target under one of {', '.join(TARGETS)}: return one of these, give a collate_fn that makes "
        "them, or use ElasticLoop"
    )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    return {key: _moved(item, device) for key, item in value.items()} if type(value) is dict else value
