"""A drop-in for lightning.Trainer that trains elastically.

How its arguments and hooks map onto a run is in docs/integrations.md.
"""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.utilities import _log_hyperparams

from resile.training import ElasticLoop, Result
from resile.training.extend import BatchPlan, LoaderSettings, SoloSession, checked_dataset, current_session, planned
from resile_shared.errors import UsageError

from ..counting import counted
from .arguments import check_callbacks, check_fit, checked_arguments
from .fit_loop import ElasticFitLoop
from .progress import FitProgress
from .strategy import WorkerStrategy

_DETERMINING = (
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "val_check_interval",
    "check_val_every_n_epoch",
    "limit_val_batches",
    "precision",
    "min_epochs",
    "min_steps",
)


class ElasticTrainer(pl.Trainer):
    """Takes what a Trainer takes, and trains on however many workers there are at the moment, with the same bits.

    The batch of the training loader times ``accumulate_grad_batches`` is the global batch, whatever the number of
    workers. It is cut into ``num_shards`` (None: accumulate_grad_batches if that is more than one, else as for
    `ElasticLoop`), which is also the largest number of workers. ``seed`` (None: that of seed_everything, or 0),
    ``checkpoint_every`` and ``threads`` are those of `ElasticLoop`. ``result`` is how the run ended. Raises UsageError
    for arguments that are not supported.
    """

    fit_loop: ElasticFitLoop
    strategy: WorkerStrategy
    callbacks: list[pl.Callback]

    def __init__(
        self,
        *,
        num_shards: int | None = None,
        seed: int | None = None,
        checkpoint_every: int | str | None = None,
        threads: int = 1,
        **arguments: Any,
    ) -> None:
        arguments = checked_arguments(arguments)
        arguments["default_root_dir"] = arguments.get("default_root_dir") or os.environ.get("RESILE_OUTPUT_DIR")
        super().__init__(**arguments)
        self._num_shards = num_shards
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self._checkpoint_every = checkpoint_every
        self._threads = threads
        self._summaries: list[ModelSummary] = []
        self.result: Result | None = None
        self.fit_loop = ElasticFitLoop(self, self.fit_loop)
        self._accelerator_connector.strategy = WorkerStrategy.instead_of(self.strategy)
        self._signal_connector.register_signal_handlers = lambda: None  # a worker is ended by Resile
        self.strategy.forget_rank()

    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train; a resumed job continues by itself, from Resile's checkpoints.

        Raises UsageError for what is not supported: manual optimization, callbacks that act by time, the file of
        another checkpoint as ``ckpt_path``, and ``"last"`` in a plain run, which has none.
        """
        check_fit(self, model, ckpt_path, is_plain=self._is_plain)
        self.strategy.forget_rank()
        if not self._is_plain:
            self._hold_back()
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, None, weights_only)

    @property
    def estimated_stepping_batches(self) -> int:
        """The number of optimizer steps of the run."""
        self.fit_loop.setup_data()
        return self.fit_loop.num_iterations

    def print(self, *values: Any, **more: Any) -> None:
        """Print on the worker that writes files at the moment."""
        if self.is_global_zero:
            print(*values, **more)

    def planned(self, settings: LoaderSettings) -> BatchPlan:
        """The batches of epochs over what the training loader reads."""
        accumulated = self.accumulate_grad_batches
        if settings.batch_size is None and accumulated > 1:
            raise UsageError(
                "the training loader has a batch sampler of its own, and accumulate_grad_batches is "
                f"{accumulated}: let the sampler draw whole global batches, and say into how many shards each is cut, "
                f"as by num_shards={accumulated}"
            )
        usual = accumulated if accumulated > 1 else None
        return planned(
            len(checked_dataset(settings.dataset, name="training")),
            (settings.batch_size or 1) * accumulated,
            usual if self._num_shards is None else self._num_shards,
            seed=self._seed,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            sampler=settings.sampler,
            batch_sampler=settings.batch_sampler,
        )

    def elastic_loop(self, progress: FitProgress) -> ElasticLoop:
        """The iterations of the run, with ``progress`` as part of its state."""
        check_callbacks(self)  # the module may have added some
        settings, plan = self.fit_loop.settings, self.fit_loop.plan
        optimizer = self.optimizers[0]
        if isinstance(optimizer, _MockOptimizer):
            raise UsageError("configure_optimizers() returned None: return an optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "configure_optimizers() returned LBFGS, which evaluates the loss several times a step: write the loop "
                "with resile.training.prepare, whose optimizer.step takes a closure"
            )
        schedules = {f"schedule {number}": config.scheduler for number, config in enumerate(self.lr_scheduler_configs)}
        loop = ElasticLoop(
            self.lightning_module,
            optimizer,
            settings.dataset,
            epochs=self.fit_loop.num_epochs,
            max_iterations=self.fit_loop.num_iterations,
            weighs_by_samples=self.accumulate_grad_batches > 1,
            batch_size=plan.batch_size,
            num_shards=plan.num_shards,
            seed=self._seed,
            state={**schedules, "trainer": progress},
            collate_fn=counted(settings.collate_fn),
            num_workers=settings.num_workers,
            checkpoint_every=self._checkpoint_every,
            threads=self._threads,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            sampler=settings.sampler,
            batch_sampler=settings.batch_sampler,
        )
        loop.require_equal(**self._determining())
        return loop

    def follow_rank(self, *, has_begun: bool) -> None:
        """Begin to print and write files, if this worker has the lowest rank now."""
        if not self.strategy.follow_rank():
            return
        for logger in self.loggers:
            if isinstance(logger, CSVLogger):
                _keep_rows(logger)
        if not has_begun:
            for summary in self._summaries:
                summary.on_fit_start(self, self.lightning_module)
            if self.enable_autolog_hparams:
                _log_hyperparams(self)
        for bar in self._bars:
            bar.enable()
            if has_begun:
                bar.on_train_start(self, self.lightning_module)
                bar.on_train_epoch_start(self, self.lightning_module)

    def _hold_back(self) -> None:
        """Until training begins, no worker knows whether it prints and writes files."""
        self._summaries = [callback for callback in self.callbacks if isinstance(callback, ModelSummary)]
        self.callbacks = [callback for callback in self.callbacks if callback not in self._summaries]
        for bar in self._bars:
            bar.disable()

    @property
    def _bars(self) -> list[ProgressBar]:
        return [callback for callback in self.callbacks if isinstance(callback, ProgressBar)]

    @property
    def _is_plain(self) -> bool:
        return isinstance(current_session(), SoloSession)

    def _determining(self) -> dict[str, str]:
        """What the bits depend on and `ElasticLoop` does not know, as text by name."""
        schedules = [
            (type(config.scheduler).__name__, config.interval, config.frequency, config.monitor)
            for config in self.lr_scheduler_configs
        ]
        return {**{f"Trainer.{name}": str(getattr(self, name)) for name in _DETERMINING}, "schedules": str(schedules)}


def _keep_rows(logger: CSVLogger) -> None:
    """Go on in the file that another worker has begun, which the logger would delete."""
    file = Path(logger.log_dir, "metrics.csv")
    if logger._experiment is not None or not file.exists():
        return
    rows = file.read_text()
    experiment = logger.experiment
    file.write_text(rows)
    experiment.metrics_keys = rows.partition("\n")[0].strip().split(",")
