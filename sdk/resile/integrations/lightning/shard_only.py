"""What a hook that runs once an iteration must not look at, and what training_step must not change."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from resile_shared.errors import UsageError

Marks = dict[str, object]
_OF_MODULES = set(vars(LightningModule()))


class _NoBatch:
    """The batch of an iteration, of which a worker has only its shards. Whatever is done with it is refused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused("the batch")

    def _refuse(self, *arguments: Any) -> Any:
        raise _refused("the batch")

    __getitem__ = __iter__ = __len__ = __contains__ = _refuse


NO_BATCH = _NoBatch()


class StepOutputs(dict[str, Tensor]):
    """The outputs of an iteration for on_train_batch_end: the loss of the whole batch, and nothing else."""

    def __missing__(self, name: str) -> Any:
        raise _refused(f"outputs[{name!r}]")


def attribute_marks(module: LightningModule) -> Marks:
    """What changes when training_step sets an attribute of ``module`` to a number or a text, or fills a container."""
    return {
        name: (id(value), len(value)) if isinstance(value, list | dict | set) else value
        for name, value in vars(module).items()
        if name not in _OF_MODULES
        and (value is None or isinstance(value, bool | int | float | str | list | dict | set))
    }


def check_unchanged(module: LightningModule, before: Marks) -> None:
    """Raises UsageError if training_step has changed an attribute, which each worker would do for its own shards."""
    for name, mark in attribute_marks(module).items():
        if name not in before or before[name] != mark:
            raise UsageError(
                f"training_step changed self.{name}, and each worker computes only some of the shards of a batch: use "
                "self.log(), whose values are averaged over the whole batch, or change it in on_train_batch_end, which "
                "every worker calls once an iteration"
            )


def _refused(what: str) -> UsageError:
    return UsageError(
        f"on_train_batch_start() or on_train_batch_end() used {what}, of which a worker has only some shards: use it "
        'in training_step, and log there what is needed afterwards; outputs["loss"] and trainer.callback_metrics are '
        "those of the whole batch"
    )
