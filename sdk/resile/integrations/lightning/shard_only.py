"""What a hook that runs once an iteration must not look at, and what training_step must not change."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from resile_shared.errors import UsageError

_OF_MODULES = set(vars(LightningModule()))
_METRICS = (Metric, MetricCollection)
_MOST_CHANGES = 3


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


class AttributeWatch:
    """Refuses a training_step that changes attributes, which each worker would do for its own shards.

    Call `begin` before it and `check` after. An attribute of ``module`` itself that is a number, a text or a container
    is refused at once. A number of a submodule, which may be a cache, and a tensor are refused when they have changed
    in `_MOST_CHANGES` shards in a row; of tensors those that one shard alone gives a meaning are left out: one that
    needs gradients (a part of the loss), has a row for each sample, or changes its shape.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._submodules = list(_submodules(module))
        self._plain: dict[str, object] = {}
        self._others: dict[str, tuple[Any, int]] = {}
        self._num_changes: Counter[str] = Counter()

    def begin(self) -> None:
        """A shard is about to be computed."""
        self._plain, self._others = self._marks(), self._other_marks()

    def check(self, *, num_samples: int) -> None:
        """The training_step of a shard of ``num_samples`` is over. Raises UsageError."""
        for name, mark in self._marks().items():
            if name not in self._plain or self._plain[name] != mark:
                raise _changed(name)
        others = self._other_marks()
        changed = [
            name
            for name, mark in others.items()
            if name in self._others and _has_changed(self._others[name], mark, num_samples=num_samples)
        ]
        self._num_changes = Counter({name: self._num_changes[name] + 1 for name in changed})
        for name in changed:
            if self._num_changes[name] == _MOST_CHANGES:
                raise _changed(name)

    def _marks(self) -> dict[str, object]:
        """What changes when an attribute of the module is set to a number or a text, or a container is filled."""
        return {
            name: (id(value), len(value)) if isinstance(value, list | dict | set) else value
            for name, value in vars(self._module).items()
            if name not in _OF_MODULES
            and (value is None or isinstance(value, bool | int | float | str | list | dict | set))
        }

    def _other_marks(self) -> dict[str, tuple[Any, int]]:
        """The tensors of all modules and the numbers of submodules; each with the count of the writes to a tensor."""
        return {
            f"{path}{name}": (value, value._version if isinstance(value, Tensor) else 0)
            for path, attributes in self._submodules
            for name, value in attributes.items()
            if (isinstance(value, Tensor) or (path and type(value) in (int, float))) and name not in _OF_MODULES
        }


def _submodules(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The path of ``module`` and of each part of it, to be put before a name, and its attributes; without metrics."""
    metrics = {id(part) for each in module.modules() if isinstance(each, _METRICS) for part in each.modules()}
    for path, part in module.named_modules():
        if id(part) not in metrics:
            yield f"{path}." if path else "", vars(part)


def _has_changed(before: tuple[Any, int], now: tuple[Any, int], *, num_samples: int) -> bool:
    """Whether an attribute has another value, which belongs to more than one shard."""
    (old, old_version), (new, version) = before, now
    if not isinstance(new, Tensor):
        return bool(old != new)
    if not isinstance(old, Tensor) or new.requires_grad or (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    if new.shape[:1] == (num_samples,):
        return False
    return version != old_version if old is new else not torch.equal(old, new)


def _changed(name: str) -> UsageError:
    return UsageError(
        f"training_step changed self.{name}, and each worker computes only some of the shards of a batch: use "
        "self.log(), whose values are averaged over the whole batch, or change it in on_train_batch_end, which every "
        "worker calls once an iteration. Keep a tensor that changes in a buffer, which workers that join receive"
    )


def _refused(what: str) -> UsageError:
    return UsageError(
        f"on_train_batch_start() or on_train_batch_end() used {what}, of which a worker has only some shards: use it "
        'in training_step, and log there what is needed afterwards; outputs["loss"] and trainer.callback_metrics are '
        "those of the whole batch"
    )
