"""What a Trainer does in each iteration, and at the beginning of a run, on every worker."""

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn

from resile.training import ElasticLoop, Iteration
from resile.training.extend import Backward, current_session, handled_backward
from resile_shared.errors import UsageError

if TYPE_CHECKING:
    from .trainer import ElasticTrainer

ITEMS, TOKENS, FLOS = "resile/items", "resile/tokens", "resile/flos"
"""Names of scalars of a shard, each divided by its samples: labels, input tokens, floating-point operations."""


class Length(NamedTuple):
    """How long a run is."""

    iterations: int
    per_epoch: int
    epochs: int


class Step:
    """What a Trainer does in each iteration, on every worker."""

    def __init__(
        self,
        trainer: "ElasticTrainer",
        model: nn.Module,
        length: Length,
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

        A worker that joins after the last iteration trains none.
        """
        follow_rank(self._trainer)
        if not self.progress.has_begun:
            self._call("on_train_begin")
            self.progress.begin()

    def begin(self, iteration: Iteration) -> None:
        """Tell the callbacks what begins. An iteration that is repeated after a loss has begun already."""
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

        def handle(loss: Tensor, run: Backward) -> None:
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


def follow_rank(trainer: "ElasticTrainer") -> None:
    """Let the libraries know which worker writes files at the moment. Each believes that it is the only process."""
    rank = current_session().view.rank
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["process_index"] = state["local_process_index"] = rank
    trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = rank == 0


def _needs_metrics(scheduler: Any) -> bool:
    """Whether a schedule steps after an evaluation, with its metrics, which the Trainer itself does."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"
