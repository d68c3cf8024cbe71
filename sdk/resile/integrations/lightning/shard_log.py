"""What a module logs in training_step: a mean of each shard, averaged over the global batch, then logged once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from resile_shared.errors import UsageError

_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute", "rank_zero_only")
_VALUE, _WEIGHT, _KEYS = "resile/value/", "resile/weight/", "resile/keys"


@dataclass
class _Entry:
    """Values logged by one name in one shard."""

    hook: str
    name: str
    options: dict[str, Any]
    is_sum: bool
    total: float = 0.0
    weight: float = 0.0
    metric: Any = None
    """The torchmetrics.Metric that was logged instead of values."""


@dataclass
class ShardLog:
    """Takes the place of the trainer's results while training_step runs; see `LightningModule.log`.

    ``num_samples`` is the number of samples in the shard: the weight of means that are logged without ``batch_size``.
    """

    num_samples: int
    entries: dict[str, _Entry] = field(default_factory=dict)
    batch: Any = None
    batch_size: int | None = None
    dataloader_idx: int | None = None

    def __len__(self) -> int:
        return 0  # callback_metrics and the like are those of the last iteration

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Nothing to do: the entries are those of one shard."""

    def log(
        self, hook: str, name: str, value: Any, *, reduce_fx: Any, batch_size: int | None = None, **options: Any
    ) -> None:
        """Record a value. Raises UsageError for a reduction that cannot be summed over shards."""
        key = f"{hook}/{name}"
        reduction = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", str(reduce_fx))
        if key not in self.entries:
            kept = {option: options[option] for option in _OPTIONS if option in options}
            self.entries[key] = _Entry(hook, name, {**kept, "reduce_fx": reduce_fx}, reduction == "sum")
        entry = self.entries[key]
        if not isinstance(value, Tensor):
            entry.metric = value
        elif reduction.lower() not in ("mean", "avg", "sum"):
            raise UsageError(
                f"self.log({name!r}, ..., reduce_fx={reduction!r}) was called in {hook}, where shards are averaged or "
                "summed: log it in validation_step, or in on_train_batch_end from trainer.callback_metrics"
            )
        elif entry.is_sum:
            entry.total += float(value)
        else:
            weight = self.num_samples if batch_size is None else batch_size
            entry.total += float(value) * weight
            entry.weight += weight

    def scalars(self) -> dict[str, float]:
        """What is exchanged, each divided by the samples of the shard, as `Iteration.compute` wants it."""
        values = {}
        for key, entry in self.entries.items():
            if entry.metric is None:
                values[_VALUE + key] = entry.total / self.num_samples
                values[_WEIGHT + key] = entry.weight / self.num_samples
        values[_KEYS] = self._checksum()
        return values

    def means(self, totals: Mapping[str, float], *, num_samples: int) -> list[tuple[_Entry, Any, int]]:
        """Each entry with its value over the global batch of ``num_samples``, and its number of samples.

        Raises UsageError if other shards have logged other names.
        """
        if abs(totals[_KEYS] - self._checksum()) > 1e-9 * self._checksum():
            raise names_differ()
        found: list[tuple[_Entry, Any, int]] = []
        for key, entry in self.entries.items():
            if entry.metric is not None:
                found.append((entry, entry.metric, num_samples))
                continue
            total, weight = totals[_VALUE + key], totals[_WEIGHT + key]
            if entry.is_sum:
                found.append((entry, torch.tensor(total * num_samples), num_samples))
            else:
                mean = total / weight if weight else float("nan")
                found.append((entry, torch.tensor(mean), round(weight * num_samples)))
        return found

    def _checksum(self) -> float:
        return float(crc32("\n".join(sorted(self.entries)).encode()))


def names_differ(missing: str = "") -> UsageError:
    """Return the error for names that are logged for some shards only; ``missing`` is one of them, if known."""
    name = repr(missing.removeprefix(_VALUE).split("/", 1)[-1]) if missing.startswith(_VALUE) else "a name"
    return UsageError(
        f"training_step logged {name} for some shards of a batch and not for others, so that there is no mean: log the "
        "same names for every batch; whether to log may depend on batch_idx and self.global_step, not on the samples"
    )
