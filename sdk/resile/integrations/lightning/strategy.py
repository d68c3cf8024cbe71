"""One worker's part in a run, as Lightning's strategies describe it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from resile.training.extend import SoloSession, current_session
from resile_shared.errors import UsageError

_NOT_LOWEST = 1


class WorkerStrategy(SingleDeviceStrategy):
    """A single device whose rank is that of its worker at the moment. `ElasticLoop` exchanges the gradients.

    Before training has begun no rank is known. Then every worker is global zero, as in a script without a trainer, but
    what the library writes and prints by itself waits.
    """

    is_in_shard = False
    """Whether training_step runs, where a worker has only its own shards."""
    _is_known = False
    """Whether the rank is known."""
    _left_to_others: tuple[Callable[[], None], ...] = ()
    """File operations of the lowest rank in an iteration, kept in case that worker is lost before they are done."""

    @classmethod
    def instead_of(cls, strategy: Any) -> "WorkerStrategy":
        """Take over what the library has chosen. Raises UsageError if that is several processes."""
        if type(strategy) is not SingleDeviceStrategy:
            raise UsageError(
                f"the Trainer chose the strategy {type(strategy).__name__}: start the script with `resile run train.py "
                "--workers N`, without torchrun, srun or variables such as PL_TRAINER_STRATEGY"
            )
        return cls(
            strategy.root_device,
            accelerator=strategy.accelerator,
            checkpoint_io=strategy.checkpoint_io,
            precision_plugin=strategy.precision_plugin,
        )

    def forget_rank(self) -> None:
        """Forget the rank: training has not begun yet."""
        self._is_known = isinstance(current_session(), SoloSession)
        self._set_rank(0 if self._is_known else _NOT_LOWEST)

    def follow_rank(self) -> bool:
        """Take over the worker's current rank. True if it is the lowest now, and was not, or was not known to be."""
        before = self.global_rank
        self._is_known = True
        self._set_rank(current_session().view.rank)
        has_become_lowest = self.global_rank == 0 != before
        for act in self._left_to_others if has_become_lowest else ():
            act()
        return has_become_lowest

    def on_exchange(self) -> None:
        """All members have exchanged gradients: the lowest rank has done its part of the iteration before."""
        self._left_to_others = ()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **more: Any) -> Any:
        """Clip the gradients and step. The gradients are there already: no step evaluates ``closure`` by itself."""
        result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**more)
        return result

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a file on the worker with the lowest rank."""
        self._act(partial(super().save_checkpoint, checkpoint, filepath, storage_options))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file on the worker with the lowest rank."""
        self._act(partial(super().remove_checkpoint, filepath))

    def _act(self, act: Callable[[], None]) -> None:
        if not self.is_global_zero:
            self._left_to_others = (*self._left_to_others, act)
        act()

    def _set_rank(self, rank: int) -> None:
        self.global_rank = rank_zero_only.rank = rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker currently writes files; before training has begun this is true on all workers."""
        return self.global_rank == 0 or not self._is_known

    def reduce(self, tensor: Any, *arguments: Any, **more: Any) -> Any:
        """Return ``tensor``: outside of training_step every worker has computed all of it."""
        self._check_outside("reduce")
        return tensor

    def all_gather(self, tensor: Any, *arguments: Any, **more: Any) -> Any:
        """Return ``tensor``: outside of training_step every worker has computed all of it."""
        self._check_outside("all_gather")
        return tensor

    def _check_outside(self, method: str) -> None:
        if self.is_in_shard:
            raise UsageError(
                f"{method}() was called in training_step, where a worker has only its own shards: self.log() averages "
                "over the whole batch, and callbacks find the mean in trainer.callback_metrics"
            )
