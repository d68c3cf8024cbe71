"""A drop-in for transformers.Trainer that trains elastically.

It keeps the Trainer's own code for everything but the loop over batches, and drives the iteration of `ElasticLoop`.
How its arguments map onto a run is in docs/integrations.md.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import SaveStrategy

from resile.training import ElasticLoop, Result
from resile.training.extend import (
    BatchPlan,
    LoaderSettings,
    SoloSession,
    checked_dataset,
    current_session,
    planned,
    read_loader,
)
from resile_shared.errors import UsageError

from ..counting import counted
from .arguments import check_arguments, determining
from .loss_scale import divides_by_items
from .progress import ElasticProgressBar, TrainerProgress
from .step import Length, Step


class ElasticTrainer(Trainer):
    """Takes what a Trainer takes, and trains on however many workers there are at the moment, with the same bits.

    ``per_device_train_batch_size * gradient_accumulation_steps`` is the global batch, whatever the number of workers.
    It is cut into ``num_shards`` (None: gradient_accumulation_steps if that is more than one, else as for
    `ElasticLoop`), which is also the largest number of workers. ``checkpoint_every`` is that of `ElasticLoop`; without
    it Resile's checkpoints are stored as often as ``save_strategy`` and ``save_steps`` say. ``threads`` are torch's
    threads in each worker. ``result`` is how the run ended. Raises UsageError for unsupported arguments.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        num_shards: int | None = None,
        checkpoint_every: int | str | None = None,
        threads: int = 1,
        **more: Any,
    ) -> None:
        if args is not None:
            args._n_gpu = min(args.n_gpu, 1)  # a worker has one device
            check_arguments(args)
        self._num_shards = num_shards
        self._checkpoint_every = checkpoint_every
        self._threads = threads
        self.result: Result | None = None
        super().__init__(model, args, *positional, **more)
        if any(type(callback) is ProgressCallback for callback in self.callback_handler.callbacks):
            self.pop_callback(ProgressCallback)
            self.add_callback(ElasticProgressBar)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; returns what Trainer.train does. A resumed job continues by itself, from Resile's checkpoints.

        Raises UsageError for the folder of another checkpoint, for ``resume_from_checkpoint=True`` in a plain run,
        which has none, and for trials.
        """
        _check_resume(resume_from_checkpoint)
        if trial is not None:
            raise UsageError("ElasticTrainer does not take trials: submit a job for each")
        return super().train(None, None, ignore_keys_for_eval)

    def hyperparameter_search(self, *arguments: Any, **more: Any) -> Any:
        """Refused: a script has one training call."""
        raise UsageError("a script has one training call, so there is no hyperparameter_search: submit a job for each")

    def _get_dataloader(self, dataset: Any, description: str, *arguments: Any, **more: Any) -> Any:
        if not more.get("is_training"):
            return super()._get_dataloader(dataset, description, *arguments, **more)
        checked_dataset(dataset, name="training")
        if hasattr(dataset, "column_names"):  # of the library datasets
            dataset, collate = self._remove_unused_columns(dataset, description=description), self.data_collator
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, description=description)
        return DataLoader(
            dataset,
            batch_size=self.args.train_batch_size,
            sampler=self._get_train_sampler(dataset),
            drop_last=self.args.dataloader_drop_last,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
        )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()
        settings = read_loader(loader)
        plan = self._plan(settings)
        length = self._length_of(plan)
        self._init_training_state(length.iterations, length.per_epoch, length.epochs, None, None)
        model, _ = self._prepare_for_training(length.iterations, loader, None)
        self._begin_counting()
        step = Step(self, model, length, ignore_keys_for_eval, counts_items=self._counts_items(model, settings, plan))
        loop = self._loop(settings, plan, length, step.progress)
        loop.require_equal(counts_items=step.counts_items, **determining(self.args))
        for iteration in loop.iterations():
            step.begin(iteration)
            for num_samples, inputs in iteration.shards():
                step.compute(iteration, num_samples, inputs)
            if iteration.exchange():
                step.update(loop, iteration)
        step.begin_training()
        self.result = loop.result
        return self._finalize_training(None, length.iterations * plan.batch_size, step.started)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = bool(super()._determine_best_metric(metrics, trial))
        if is_best and self.args.load_best_model_at_end and self.is_in_train:
            self._progress.keep_best()
        return is_best

    def _load_best_model(self) -> None:
        """Nothing to do: the last iteration has loaded it, on all workers."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            super()._save_checkpoint(model, trial)

    def _plan(self, settings: LoaderSettings) -> BatchPlan:
        accumulated = self.args.gradient_accumulation_steps
        if settings.batch_size is None and accumulated > 1:
            raise UsageError(
                f"gradient_accumulation_steps is {accumulated}, and the training loader has a batch sampler of its "
                "own: let the batch sampler yield whole global batches, which are cut into num_shards, and leave "
                "gradient_accumulation_steps out"
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

    @property
    def _seed(self) -> int:
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _length_of(self, plan: BatchPlan) -> Length:
        per_epoch = plan.per_epoch
        limit = self.args.max_steps
        iterations = limit if limit > 0 else math.ceil(self.args.num_train_epochs * per_epoch)
        return Length(iterations, per_epoch, math.ceil(iterations / per_epoch))

    def _begin_counting(self) -> None:
        self._tr_loss = torch.tensor(0.0, dtype=torch.float64)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = 0
        self._initial_num_input_tokens_seen = 0
        self.current_flos = 0
        self.current_gradient_accumulation_steps = 1  # of a loss that is a mean: shards are weighted by their samples
        self._progress = TrainerProgress(self, keeps_best=self.args.load_best_model_at_end)

    def _loop(
        self, settings: LoaderSettings, plan: BatchPlan, length: Length, progress: TrainerProgress
    ) -> ElasticLoop:
        return ElasticLoop(
            self.model,
            self.optimizer.optimizer,
            settings.dataset,
            epochs=length.epochs,
            max_iterations=length.iterations,
            batch_size=plan.batch_size,
            num_shards=plan.num_shards,
            seed=self._seed,
            state={"lr_scheduler": self.lr_scheduler, "trainer": progress},
            collate_fn=counted(settings.collate_fn),
            num_workers=settings.num_workers,
            checkpoint_every=self._checkpoint_every or self._checkpoint_interval(length.per_epoch),
            threads=self._threads,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            sampler=settings.sampler,
            batch_sampler=settings.batch_sampler,
        )

    def _checkpoint_interval(self, per_epoch: int) -> int | None:
        if self.args.save_strategy == SaveStrategy.STEPS:
            return int(self.state.save_steps) or None
        return per_epoch if self.args.save_strategy == SaveStrategy.EPOCH else None

    def _counts_items(self, model: nn.Module, settings: LoaderSettings, plan: BatchPlan) -> bool:
        """Whether the loss is divided by the number of items in the batch. All workers look at the same samples."""
        num_samples = max(1, plan.batch_size // plan.num_shards)
        samples = [settings.dataset[index] for index in range(min(num_samples, len(settings.dataset)))]
        inputs = self._prepare_inputs(settings.collate_fn(samples))
        if self._get_num_items_in_batch([inputs], self.args.device) is None:
            return False
        doubled = self._prepare_inputs(settings.collate_fn([*samples, *samples]))

        def loss(inputs: Any, num_items: int) -> Any:
            with self.compute_loss_context_manager():
                return self.compute_loss(model, inputs, num_items_in_batch=torch.tensor(num_items))

        return divides_by_items(model, loss, inputs, doubled)


def _check_resume(resume_from_checkpoint: str | bool | None) -> None:
    if not resume_from_checkpoint:
        return
    if resume_from_checkpoint is not True:
        raise UsageError(
            f"resume_from_checkpoint is {resume_from_checkpoint!r}, and a job resumes from Resile's own checkpoints, "
            "which needs no argument: `resile run train.py --resume`. To begin with the weights of a folder, load them "
            "by from_pretrained"
        )
    if isinstance(current_session(), SoloSession):
        raise UsageError(
            "resume_from_checkpoint=True in a plain run, which stores no checkpoints of Resile, would start over: "
            "start it with `resile run train.py --resume`"
        )
