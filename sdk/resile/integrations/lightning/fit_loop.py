"""The loop over batches, in place of Lightning's: it drives the iteration of `ElasticLoop`.

Everything around it (hooks, results, schedules, validation, the end of an epoch) is Lightning's own code.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from resile.training import ElasticLoop, Iteration
from resile.training.extend import Backward, BatchPlan, LoaderSettings, handled_backward, read_loader
from resile_shared.errors import UsageError

from .metric_states import MetricStates
from .progress import FitProgress
from .shard_log import ShardLog, names_differ
from .shard_only import NO_BATCH, AttributeWatch, StepOutputs

if TYPE_CHECKING:
    from .trainer import ElasticTrainer


class ElasticEpochLoop(_TrainingEpochLoop):
    """Counts global batches, of which each is stepped: there is nothing to accumulate."""

    def _accumulated_batches_reached(self) -> bool:
        return True

    def _should_accumulate(self) -> bool:
        return False


class ElasticFitLoop(_FitLoop):
    """Trains on however many workers there are at the moment."""

    trainer: "ElasticTrainer"
    settings: LoaderSettings
    plan: BatchPlan
    _combined_loader: Any

    def __init__(self, trainer: "ElasticTrainer", usual: _FitLoop) -> None:
        super().__init__(trainer, usual.min_epochs, usual.max_epochs)
        self.epoch_loop = ElasticEpochLoop(trainer, usual.min_steps, usual.max_steps)

    def setup_data(self) -> None:
        """Read what the training loader says about batches; its batches themselves are read by `ElasticLoop`."""
        if self._combined_loader is not None:
            return
        trainer = self.trainer
        loader = _request_dataloader(self._data_source)
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"the training loader is a {type(loader).__name__}, and a run has one torch.utils.data.DataLoader: "
                "combine several datasets into one, as by torch.utils.data.StackDataset or ConcatDataset"
            )
        self.settings = read_loader(loader)
        self.plan = trainer.planned(self.settings)
        self._combined_loader = CombinedLoader(loader, "max_size_cycle")
        self.max_batches = self.plan.per_epoch
        if trainer.fast_dev_run:
            self.max_batches = min(self.max_batches, int(trainer.fast_dev_run))
        interval = trainer.val_check_interval
        if type(interval) is int:
            trainer.val_check_batch = interval
            if interval > self.max_batches and trainer.check_val_every_n_epoch is not None:
                raise UsageError(
                    f"val_check_interval is {interval}, and an epoch has {self.max_batches} batches: use fewer, or "
                    "check_val_every_n_epoch=None to count through epochs"
                )
        else:
            trainer.val_check_batch = max(1, int(self.max_batches * interval))

    @property
    def num_epochs(self) -> int:
        """The number of epochs, the last of which may be incomplete."""
        epochs: int = self.max_epochs
        return epochs if epochs != -1 else math.ceil(self.max_steps / self.plan.per_epoch)

    @property
    def num_iterations(self) -> int:
        """The number of optimizer steps."""
        in_epochs: int = self.num_epochs * self.plan.per_epoch
        return in_epochs if self.max_steps == -1 else min(in_epochs, int(self.max_steps))

    def run(self) -> None:
        """Train."""
        self.setup_data()
        if self.skip:
            return
        self.reset()
        module = self.trainer.lightning_module
        metrics = MetricStates(module)
        step = _Step(self, metrics, FitProgress(self.trainer, metrics))
        loop = self.trainer.elastic_loop(step.progress)
        for iteration in loop.iterations():
            step.begin(iteration)
            for num_samples, batch in iteration.shards() if iteration.num_held else iteration.spare_shard():
                step.compute(iteration, num_samples, batch)
            if step.exchange(iteration):
                step.update(loop, iteration)
        step.begin_training()
        self.trainer.result = loop.result
        self.on_run_end()


class _Step:
    """What a Trainer does in each iteration, on every worker."""

    def __init__(self, loop: ElasticFitLoop, metrics: MetricStates, progress: FitProgress) -> None:
        self.progress = progress
        self._loop = loop
        self._epoch_loop = loop.epoch_loop
        self._trainer = loop.trainer
        self._module = loop.trainer.lightning_module
        self._metrics = metrics
        self._attributes = AttributeWatch(self._module)
        self._log: ShardLog | None = None
        """The log of the newest shard of the iteration."""

    def begin_training(self) -> None:
        """Call the hooks of the run's start, once: at the first iteration, or at the end if there was none.

        A worker that joins after the last iteration trains none.
        """
        self._trainer.follow_rank(has_begun=self.progress.has_begun)
        if not self.progress.has_begun:
            self._loop.on_run_start()
            self.progress.begin()

    def begin(self, iteration: Iteration) -> None:
        """Call the hooks of a new epoch or iteration. An iteration that is repeated after a loss has begun already."""
        self._log = None
        self.begin_training()
        if iteration.number == self.progress.begun:
            return
        self.progress.begun = iteration.number
        if iteration.epoch != self.progress.epoch:
            self.progress.epoch = iteration.epoch
            self._loop.on_advance_start()
            self._epoch_loop.reset()
        batches = self._epoch_loop.batch_progress
        batches.is_last_batch = iteration.ends_epoch
        batches.increment_ready()
        self._trainer._logger_connector.on_batch_start(None)
        self._epoch_loop._results.batch_size = iteration.num_samples
        if self._call("on_train_batch_start", NO_BATCH, self._epoch_loop.batch_idx) == -1:
            raise UsageError(
                "on_train_batch_start() returned -1, which would leave samples of the epoch out: set "
                "trainer.should_stop = True to end training"
            )
        batches.increment_started()

    def compute(self, iteration: Iteration, num_samples: int, batch: Any) -> None:
        """Compute the gradients of one shard."""
        trainer, module = self._trainer, self._module
        log, earlier = ShardLog(num_samples), self._log
        num_backward = 0

        def handle(loss: Tensor, run: Backward) -> None:
            nonlocal num_backward
            num_backward += 1
            if num_backward == 1:
                iteration.compute(loss, run, {"loss": loss, **log.scalars(), **shares}, allows_nan=False)

        with self._logging_to(log):
            with self._metrics.shard(num_samples) as shares:
                loss = self._training_step(batch, num_samples)
            if earlier is not None and earlier.entries.keys() != log.entries.keys():
                raise names_differ()
            with handled_backward(handle):
                loss = trainer.precision_plugin.pre_backward(loss, module)
                trainer.precision_plugin.backward(loss, module, trainer.optimizers[0])
        if num_backward != 1:
            raise UsageError(
                f"backward() of {type(module).__name__} called loss.backward() {num_backward} times: call it once"
            )
        self._log = log

    def _training_step(self, batch: Any, num_samples: int) -> Tensor:
        """Call training_step with a shard of ``num_samples``; returns the loss."""
        trainer, module = self._trainer, self._module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        arguments = self._epoch_loop._build_kwargs(OrderedDict(), batch, self._epoch_loop.batch_idx)
        self._attributes.begin()
        output = call._call_strategy_hook(trainer, "training_step", *arguments.values())
        self._attributes.check(num_samples=num_samples)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"training_step returned {output!r:.60}, and every batch of an epoch counts: return the loss, or a "
                'dict with it as "loss"; a loss of `0 * loss` for a batch that should not count'
            )
        return loss

    @contextmanager
    def _logging_to(self, log: ShardLog) -> Iterator[None]:
        """In this context a shard is computed, and what is logged goes to ``log``."""
        connector, strategy = self._trainer._logger_connector, self._trainer.strategy
        results, hook = self._epoch_loop._results, connector._current_fx
        self._epoch_loop._results, strategy.is_in_shard = log, True
        try:
            yield
        finally:
            self._epoch_loop._results, strategy.is_in_shard = results, False
            connector._current_fx = hook

    def exchange(self, iteration: Iteration) -> bool:
        """Make gradients, loss and logged values those of the batch, on every worker. False if a member was lost."""
        try:
            is_complete = iteration.exchange()
        except KeyError as missing:  # a name that other shards have not
            raise names_differ(str(missing.args[0])) from None
        if is_complete:
            self._trainer.strategy.on_exchange()
        return is_complete

    def update(self, loop: ElasticLoop, iteration: Iteration) -> None:
        """Step, log, validate, and end the epoch or the run where that is due."""
        trainer, epoch_loop = self._trainer, self._epoch_loop
        self._take_totals(iteration)
        loss = torch.tensor(iteration.loss)
        self._step_optimizer(loss)
        epoch_loop.batch_progress.increment_processed()
        epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if epoch_loop._num_ready_batches_reached():
            epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call("on_train_batch_end", StepOutputs(loss=loss), NO_BATCH, epoch_loop.batch_idx)
        trainer._logger_connector.on_batch_end()
        epoch_loop.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        epoch_loop.automatic_optimization._on_before_zero_grad(trainer.optimizers[0])
        epoch_loop.automatic_optimization._optimizer_zero_grad(epoch_loop.batch_idx, trainer.optimizers[0])
        epoch_loop.on_advance_end(None)  # validates
        is_last = iteration.number + 1 == self._loop.num_iterations
        if iteration.ends_epoch or is_last or self._is_stopped():
            self._loop.on_advance_end()
        if self._is_stopped():
            loop.stop()

    def _take_totals(self, iteration: Iteration) -> None:
        """Log the values of the whole batch in place of those of the shards."""
        assert self._log is not None
        totals, num_samples = iteration.metrics, iteration.num_samples
        iteration.metrics = {}
        self._metrics.commit(totals, num_samples=num_samples)
        self._epoch_loop._results.batch_size = num_samples
        before = self._module._current_fx_name
        for entry, value, batch_size in self._log.means(totals, num_samples=num_samples):
            self._module._current_fx_name = entry.hook
            self._module.log(entry.name, value, batch_size=batch_size, **entry.options)
            if isinstance(value, Tensor):
                iteration.metrics[entry.name] = float(value)
        self._module._current_fx_name = before

    def _step_optimizer(self, loss: Tensor) -> None:
        """Clip the gradients and step, through the hooks of the module, whose closure has nothing left to compute."""
        trainer = self._trainer
        steps = self._epoch_loop.automatic_optimization.optim_progress.optimizer.step
        self._call("on_after_backward")
        steps.increment_ready()
        call._call_lightning_module_hook(
            trainer,
            "optimizer_step",
            trainer.current_epoch,
            self._epoch_loop.batch_idx,
            trainer.strategy._lightning_optimizers[0],
            lambda: loss,
        )
        steps.increment_completed()

    def _call(self, hook: str, *arguments: Any) -> Any:
        """Call ``hook`` of the callbacks, and then of the module, whose answer is returned."""
        call._call_callback_hooks(self._trainer, hook, *arguments)
        return call._call_lightning_module_hook(self._trainer, hook, *arguments)

    def _is_stopped(self) -> bool:
        return bool(self._trainer.should_stop and self._loop._can_stop_early)
