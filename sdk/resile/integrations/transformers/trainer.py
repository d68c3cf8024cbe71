"""A drop-in for transformers.Trainer that trains elastically.

It keeps the Trainer's own code for everything but the loop over batches, and drives the iteration of `ElasticLoop`.
How its arguments map onto a run is in docs/integrations.md.
"""

import math
import time
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import SaveStrategy

from resile_learner.session import SoloSession, current_session
from resile_learner.training.backward import Run, handled_backward
from resile_learner.training.batches import BatchPlan
from resile_learner.training.data_loader import LoaderSettings, read_loader
from resile_learner.training.fetch import checked_dataset
from resile_learner.training.iteration import Iteration
from resile_learner.training.loop import ElasticLoop
from resile_learner.training.reports import Result
from resile_learner.training.samplers import planned
from resile_shared.errors import UsageError

from ..counting import counted
from .arguments import check_arguments, determining
from .loss_scale import divides_by_items
from .progress import ElasticProgressBar, TrainerProgress

ITEMS, TOKENS, FLOS = "resile/items", "resile/tokens", "resile/flos"
"""Among the scalars of a shard, each divided by its samples: labels, input tokens, floating-point operations."""


class _Length(NamedTuple):
    """How long a run is."""

    iterations: int
    per_epoch: int
    epochs: int


class ElasticTrainer(Trainer):
    """Takes what a Trainer takes, and trains on however many workers there are at the moment, with the same bits.

    ``per_device_train_batch_size * gradient_accumulation_steps`` is the global batch, whatever the number of workers.
    It is cut into ``num_shards`` (None: gradient_accumulation_steps if that is more than one, else as for
    `ElasticLoop`), which is also the largest number of workers. ``checkpoint_every`` is that of `ElasticLoop`; without
    it Resile's checkpoints are stored as often as ``save_strategy`` and ``save_steps`` say. ``threads`` are torch's
    threads in each worker. ``result`` is how the run ended. Raises UsageError for arguments that cannot hold.
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
        step = _Step(self, model, length, ignore_keys_for_eval, counts_items=self._counts_items(model, settings, plan))
        loop = self._loop(settings, plan, length, step.progress)
        loop.require_equal(counts_items=step.counts_items, **determining(self.args))
        for iteration in loop:
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

    def _length_of(self, plan: BatchPlan) -> _Length:
        per_epoch = plan.per_epoch
        limit = self.args.max_steps
        iterations = limit if limit > 0 else math.ceil(self.args.num_train_epochs * per_epoch)
        return _Length(iterations, per_epoch, math.ceil(iterations / per_epoch))

    def _begin_counting(self) -> None:
        self._tr_loss = torch.tensor(0.0, dtype=torch.float64)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = 0
        self._initial_num_input_tokens_seen = 0
        self.current_flos = 0
        self.current_gradient_accumulation_steps = 1  # of a loss that is a mean: shards are weighted by their samples
        self._progress = TrainerProgress(self, keeps_best=self.args.load_best_model_at_end)

    def _loop(
        self, settings: LoaderSettings, plan: BatchPlan, length: _Length, progress: TrainerProgress
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


class _Step:
    """What a Trainer does in each iteration, on every worker."""

    def __init__(
        self,
        trainer: ElasticTrainer,
        model: nn.Module,
        length: _Length,
        ignored_keys: list[str] | None,
        *,
        counts_items: bool,
    ) -> None:
        self.counts_items = counts_items
        self.progress = trainer._progress
        self.started = time.time()
        self._trainer = trainer
        self._model = model
        self._length = length
        self._ignored_keys = ignored_keys
        self._begun = -1
        self._epoch = -1

    def begin_training(self) -> None:
        """Tell the callbacks that training begins, once: at the first iteration, or at the end if there was none.

        A worker that joins when the last iteration is over has none.
        """
        _follow_rank(self._trainer)
        if not self.progress.has_begun:
            self._call("on_train_begin")
            self.progress.begin()

    def begin(self, iteration: Iteration) -> None:
        """Tell the callbacks what begins. An iteration that is repeated, since a member was lost, has begun already."""
        trainer = self._trainer
        is_first = not self.progress.has_begun
        self.begin_training()
        if is_first and trainer.args.eval_on_start and iteration.number == 0:
            trainer._evaluate(None, self._ignored_keys, skip_scheduler=True)
        if iteration.number == self._begun:
            return
        self._begun = iteration.number
        if iteration.epoch != self._epoch:
            self._epoch = iteration.epoch
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def compute(self, iteration: Iteration, num_samples: int, inputs: Any) -> None:
        """Compute the gradients of one shard."""
        trainer = self._trainer
        values: dict[str, float] = {FLOS: float(trainer.floating_point_ops(inputs)) / num_samples}
        values[TOKENS] = self._num_tokens(inputs) / num_samples
        values |= self.progress.scalars(iteration.number)
        items: Tensor | None = None
        if self.counts_items:
            values[ITEMS] = float(trainer._get_num_items_in_batch([inputs], trainer.args.device)) / num_samples
            items = torch.tensor(num_samples, device=trainer.args.device)
        num_backward = 0

        def handle(loss: Tensor, run: Run) -> None:
            nonlocal num_backward
            num_backward += 1
            if num_backward == 1:
                iteration.compute(loss, run, {"loss": loss, **values}, allows_nan=False)

        with handled_backward(handle):
            trainer.training_step(self._model, inputs, items)
        if num_backward != 1:
            raise UsageError(
                f"training_step() called backward() {num_backward} times: call it once for each batch, with the sum of "
                "all losses"
            )

    def update(self, loop: ElasticLoop, iteration: Iteration) -> None:
        """Apply the exchanged gradients, log, evaluate, save, and end the epoch or the run where that is due."""
        trainer = self._trainer
        self._take_totals(iteration)
        norm = trainer._clip_grad_norm(self._model) if trainer.args.max_grad_norm > 0 else None
        norm = trainer._get_grad_norm(self._model, grad_norm=norm)
        self._call("on_pre_optimizer_step")
        trainer.optimizer.step()
        self._call("on_optimizer_step")
        rate = trainer._get_learning_rate()
        if not _needs_metrics(trainer.lr_scheduler):
            trainer.lr_scheduler.step()
        self._model.zero_grad()
        step = iteration.number - iteration.epoch * self._length.per_epoch + 1
        trainer.state.global_step = iteration.number + 1
        trainer.state.epoch = iteration.epoch + step / self._length.per_epoch
        self._call("on_step_end")
        self._log_save_evaluate(norm, rate)
        if iteration.ends_epoch or trainer.control.should_training_stop:
            self._call("on_epoch_end")
            self._log_save_evaluate(norm, rate)
        self._check_epoch()
        if trainer.control.should_training_stop or trainer.state.global_step == self._length.iterations:
            self.progress.load_best()
            loop.stop()

    def _take_totals(self, iteration: Iteration) -> None:
        """Make gradients and loss those of the batch, and take out of the metrics what is the Trainer's alone."""
        trainer, totals = self._trainer, iteration.metrics
        assert iteration.loss is not None
        self.progress.compare(totals)
        trainer.current_flos += round(totals.pop(FLOS) * iteration.num_samples)
        trainer.state.num_input_tokens_seen += round(totals.pop(TOKENS) * iteration.num_samples)
        if self.counts_items:
            items = totals.pop(ITEMS)
            if not items:
                raise UsageError(
                    f"the batch of iteration {iteration.number} has no labels but -100, so there is nothing to learn "
                    "from it: leave such samples out of the dataset"
                )
            gradients = [each.grad for each in trainer.model.parameters() if each.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / items)
            iteration.loss /= items
        if math.isinf(iteration.loss) and trainer.args.logging_nan_inf_filter:
            trainer._tr_loss += trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        else:
            trainer._tr_loss += iteration.loss

    def _num_tokens(self, inputs: Any) -> int:
        state = self._trainer.state
        before = state.num_input_tokens_seen
        self._trainer._track_num_input_tokens(inputs)
        tokens, state.num_input_tokens_seen = state.num_input_tokens_seen - before, before
        return int(tokens)

    def _log_save_evaluate(self, norm: Any, rate: float) -> None:
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            norm,
            self._model,
            None,
            trainer.state.epoch,
            self._ignored_keys,
            self.started,
            learning_rate=rate,
        )

    def _call(self, event: str) -> None:
        trainer = self._trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state, trainer.control)

    def _check_epoch(self) -> None:
        if self._trainer.control.should_epoch_stop:
            raise UsageError(
                "a callback set control.should_epoch_stop, which would leave samples of the epoch out: set "
                "control.should_training_stop to end training"
            )


def _follow_rank(trainer: ElasticTrainer) -> None:
    """Let the libraries know which worker writes files at the moment. Each believes that it is the only process."""
    rank = current_session().view.rank
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["process_index"] = state["local_process_index"] = rank
    trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = rank == 0


def _needs_metrics(scheduler: Any) -> bool:
    """Whether a schedule steps after an evaluation, with its metrics, which the Trainer itself does."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


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
            "resume_from_checkpoint=True in a plain run, which stores no checkpoints of Resile, would begin anew: "
            "start it with `resile run train.py --resume`"
        )
