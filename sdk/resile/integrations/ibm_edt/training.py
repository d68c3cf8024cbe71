"""The training of a FabricModel: the iteration of `ElasticLoop`, with the platform's callbacks and files around it.

All code that changes state, callbacks included, runs on every worker after an exchange, so that members that repeat
an iteration begin it with the same state.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from resile.training import ElasticLoop, Iteration, Result, Validation
from resile.training.extend import Collate, check_is_mean, current_session, planned
from resile_shared.errors import UsageError

from .callbacks import Logged, Withheld, call_all, log
from .files import ModelFiles
from .metrics import Metric, accuracy, evaluate, has_accuracy
from .own_step import OwnStep, WrappedModel, moved
from .progress import FabricProgress

DIGEST = "resile/callbacks"
"""The name of a scalar of each shard: the digest of the attributes of callbacks."""


@dataclass(frozen=True)
class Parts:
    """What a FabricModel is made of."""

    model: nn.Module
    datasets: Callable[[], Any]
    loss_function: Any
    optimizer: torch.optim.Optimizer
    metrics: Mapping[str, Metric]
    collate: Collate | None
    lr_scheduler: Any
    user_callbacks: list[Any]
    driver_logger: Any
    worker_logger: Any
    step_train: Callable[..., Any] | None
    test: Callable[..., Any] | None
    step_arguments: Any
    saves_onnx: bool


@dataclass(frozen=True)
class Schedule:
    """How long a FabricModel trains, and how often it validates and stores checkpoints."""

    epochs: int
    batch_size: int
    """The batch size of one engine."""
    engines: int
    num_readers: int
    validation_every: int
    """Epochs between two validations, as ``checkpoint_every`` between two checkpoints; 0: never."""
    checkpoint_every: int


class FabricTraining:
    """One training call. `run` it once."""

    def __init__(self, parts: Parts, schedule: Schedule, files: ModelFiles) -> None:
        self._parts = parts
        self._schedule = schedule
        self._files = files
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._wrapped = WrappedModel(parts.model, parts.optimizer, parts.loss_function)
        loggers = [parts.driver_logger] if parts.driver_logger is not parts.worker_logger else []
        self._progress = FabricProgress(lambda: [*parts.user_callbacks, *loggers])
        self._first_words = Withheld()
        self._own_scores: list[Mapping[str, Any]] = []
        """The scores of this worker's shards in the open iteration."""
        self._num_own_batches = 0
        self._has_checked_loss = False
        self._training: Any
        self._tests: Any
        self._own_step: OwnStep | None = None

    def run(self) -> Result:
        """Train to the end. Raises UsageError for settings that cannot work."""
        parts = self._parts
        self._training, self._tests = load_datasets(parts.datasets)
        parts.model.to(self._device)
        if parts.step_train:
            loader = DataLoader(self._training, batch_size=self._schedule.batch_size, collate_fn=parts.collate)
            self._own_step = OwnStep(parts.step_train, self._wrapped, evaluate, loader, parts.step_arguments)
        loop = self._loop()
        self._begin()
        for iteration in loop.iterations():
            self._compute(iteration)
            if iteration.exchange():
                self._update(loop, iteration)
        self._end(loop)
        assert loop.result is not None
        return loop.result

    def _loop(self) -> ElasticLoop:
        parts, schedule = self._parts, self._schedule
        batch_size = schedule.batch_size * schedule.engines
        per_epoch = planned(
            len(self._training), batch_size, schedule.engines, seed=0, shuffle=True, drop_last=False, sampler=None
        ).per_epoch
        state = {"fabric": self._progress, "lr_scheduler": parts.lr_scheduler}
        return ElasticLoop(
            parts.model,
            parts.optimizer,
            self._training,
            epochs=schedule.epochs,
            batch_size=batch_size,
            num_shards=schedule.engines,
            state={name: part for name, part in state.items() if part is not None},
            validation=self._validation(),
            collate_fn=parts.collate,
            num_workers=schedule.num_readers,
            checkpoint_every=per_epoch * schedule.checkpoint_every or None,
        )

    def _validation(self) -> Validation | None:
        if self._tests is None or self._parts.test or not self._schedule.validation_every:
            return None
        return Validation(self._tests, self._score, self._parts.collate, every=self._schedule.validation_every)

    def _begin(self) -> None:
        parts = self._parts
        for callback in parts.user_callbacks:
            callback.params = {
                "optimizer": parts.optimizer,
                "epochs": self._schedule.epochs,
                "batch_size": self._schedule.batch_size,
            }
            callback.model = parts.model
        with self._first_words.hold():  # which worker will be the lowest rank is not known yet
            call_all(self._all_callbacks, "on_train_begin", lambda call: call())
            call_all(parts.user_callbacks, "on_epoch_begin", lambda call: call(0))
        self._progress.callbacks.begin()

    def _compute(self, iteration: Iteration) -> None:
        self._parts.model.train()
        digest = float(self._progress.digest())
        shards: list[Mapping[str, Any]] = []
        for batch in iteration.shards():
            scores = self._own_step(iteration, batch, {DIGEST: digest}) if self._own_step else None
            shards.append(scores or self._step(iteration, batch, digest))
        self._own_scores = shards

    def _step(self, iteration: Iteration, batch: Any, digest: float) -> Mapping[str, Any]:
        outputs, targets, loss = self._forward(self._parts.model, batch)
        if not self._has_checked_loss:
            self._has_checked_loss = True
            check_is_mean(self._parts.loss_function, outputs, targets, loss)
        with torch.no_grad():
            metrics = self._metrics(outputs, targets)
        iteration.backward(loss, **metrics, **{DIGEST: digest})
        return {"loss": loss.detach(), **metrics}

    def _forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any, Tensor]:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise UsageError(
                "a sample of the dataset is not a pair (input, target): return pairs, or give FabricModel a "
                "fn_batch_collate that makes pairs"
            )
        inputs, targets = (moved(part, self._device) for part in batch)
        outputs = model(inputs)
        return outputs, targets, self._parts.loss_function(outputs, targets)

    def _metrics(self, outputs: Any, targets: Any) -> dict[str, float]:
        known = self._parts.metrics or ({"accuracy": accuracy} if has_accuracy(outputs, targets) else {})
        return {name: float(metric(outputs, targets)) for name, metric in known.items()}

    def _score(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        outputs, targets, loss = self._forward(model, batch)
        return {"loss": loss, **self._metrics(outputs, targets)}

    def _update(self, loop: ElasticLoop, iteration: Iteration) -> None:
        progress, parts = self._progress, self._parts
        progress.check(iteration.metrics.pop(DIGEST))
        if iteration.number == 0 and self._is_heard:
            self._first_words.release()
        parts.optimizer.step()
        self._tell_validation(loop)
        assert iteration.loss is not None
        scores = {"loss": iteration.loss, **iteration.metrics}
        progress.add(scores, num_batches=iteration.num_shards, num_samples=iteration.num_samples)
        with self._heard():
            log(parts.driver_logger, "log_train_metrics", self._logged(progress.means, iteration.epoch))
        self._log_own(iteration)
        if iteration.ends_epoch:
            self._end_epoch(iteration)

    def _end_epoch(self, iteration: Iteration) -> None:
        parts, epoch, epochs = self._parts, iteration.epoch, self._schedule.epochs
        means, is_last = self._progress.means, epoch + 1 == epochs
        self._progress.end_epoch()
        if self._is_due(epoch, self._schedule.validation_every) and self._tests is not None:
            if parts.test:
                self._tell_test({"loss": self._own_test(parts.test)}, epoch)
            else:
                self._progress.untold = epoch
        if parts.lr_scheduler is not None:
            needs_loss = isinstance(parts.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            parts.lr_scheduler.step(*([means["loss"]] if needs_loss else []))
        if self._is_heard and self._schedule.checkpoint_every and (epoch + 1) % self._schedule.checkpoint_every == 0:
            self._files.save(str(epoch + 1))
        saves = self._is_heard and is_last and parts.saves_onnx
        with self._heard():
            call_all(parts.user_callbacks, "on_epoch_end", lambda call: call(epoch, saves))
            if not is_last:
                call_all(parts.user_callbacks, "on_epoch_begin", lambda call: call(epoch + 1))

    def _end(self, loop: ElasticLoop) -> None:
        self._tell_validation(loop)
        with self._heard():
            call_all(self._all_callbacks, "on_train_end", lambda call: call())
        if self._is_heard:
            self._files.save("final")
            self._files.save_scores(self._progress.tests)
            if self._parts.saves_onnx:
                collate = self._parts.collate or torch.utils.data.default_collate
                self._files.save_onnx(moved(collate([self._training[0]]), self._device)[0])

    def _own_test(self, test: Callable[..., Any]) -> float:
        """Run the script's own test over all test samples, on every worker."""
        modes = [(module, module.training) for module in self._parts.model.modules()]
        loader = DataLoader(self._tests, batch_size=self._schedule.batch_size, collate_fn=self._parts.collate)
        self._parts.model.eval()
        try:
            with torch.no_grad(), self._heard():
                return float(test(self._wrapped, loader, self._parts.step_arguments))
        finally:
            for module, mode in modes:
                module.training = mode

    def _is_due(self, epoch: int, every: int) -> bool:
        return every > 0 and ((epoch + 1) % every == 0 or epoch + 1 == self._schedule.epochs)

    def _tell_validation(self, loop: ElasticLoop) -> None:
        """Tell the loggers about a validation that was completed since the last iteration."""
        epoch, self._progress.untold = self._progress.untold, None
        if epoch is not None:
            self._tell_test(dict(loop.validation), epoch)

    def _tell_test(self, scores: dict[str, float], epoch: int) -> None:
        self._progress.tests.append({"steps": self._progress.num_batches, **scores})
        with self._heard():
            log(self._parts.driver_logger, "log_test_metrics", self._logged(scores, epoch))

    def _logged(self, scores: Mapping[str, float], epoch: int) -> Logged:
        return Logged(scores, self._progress.num_batches, epoch, 0, current_session().view.size)

    def _log_own(self, iteration: Iteration) -> None:
        self._num_own_batches += len(self._own_scores)
        if self._parts.worker_logger is None or not self._own_scores:
            return
        names = self._own_scores[0]
        means = {name: sum(float(each[name]) for each in self._own_scores) / len(self._own_scores) for name in names}
        view = current_session().view
        logged = Logged(means, self._num_own_batches, iteration.epoch, view.me, view.size)
        log(self._parts.worker_logger, "log_train_metrics", logged)

    @property
    def _all_callbacks(self) -> list[Any]:
        parts = self._parts
        return [*parts.user_callbacks, parts.driver_logger, *([parts.worker_logger] if parts.worker_logger else [])]

    @property
    def _is_heard(self) -> bool:
        """Whether this worker currently prints and writes files."""
        return current_session().view.rank == 0

    def _heard(self) -> AbstractContextManager[None]:
        return nullcontext() if self._is_heard else Withheld().hold()


def load_datasets(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of ``function``: a dataset for training, and one for tests or None. Raises UsageError.

    The first worker of a host downloads; the others wait for it, and then find the downloaded files.
    """
    with _locked(os.environ.get("DATA_DIR", "")):
        pair = function()
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise UsageError(
            f"the function for datasets returned {type(pair).__name__}: return two things, a dataset for training and "
            "one for tests or None"
        )
    return pair[0], pair[1]


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock ``folder``, if it can be locked: exclusively, or shared with all workers that had to wait."""
    lock = None
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
