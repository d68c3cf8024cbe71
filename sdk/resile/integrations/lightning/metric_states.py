"""The states of torchmetrics that training_step updates: sums over shards, exchanged like the loss."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_sum

from resile_shared.errors import UsageError

_NAME = "resile/metric/"
_MOST_ELEMENTS = 4096
"""A metric state with more elements is refused: its elements travel in headers."""


class MetricStates:
    """All metrics that are parts of ``module``.

    While a shard is computed they begin with their default states, so that what they have then is the shard's share.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._collections = [part for part in module.modules() if isinstance(part, MetricCollection)]
        self._updated: set[str] = set()

    @contextmanager
    def shard(self, num_samples: int) -> Iterator[dict[str, float]]:
        """Compute a shard in this context; afterwards the dict has the values to exchange."""
        before = {name: _taken(metric) for name, metric in self._metrics.items()}
        shares: dict[str, float] = {}
        try:
            for metric in self._metrics.values():
                _begin(metric)
            yield shares
            for name, metric in self._metrics.items():
                if metric._update_count:
                    self._updated.add(name)
                    shares |= _shares(name, metric, num_samples)
        finally:
            for name, metric in self._metrics.items():
                _restore(metric, before[name])

    def commit(self, totals: Mapping[str, float], *, num_samples: int) -> None:
        """Add the shares of all shards, and make the value of the whole batch the one that is logged on each step."""
        for name in sorted(self._updated):
            metric = self._metrics[name]
            before = _taken(metric)
            shares = {state: _summed(totals, name, metric, state, num_samples) for state in metric._defaults}
            _begin(metric)
            for state, share in shares.items():
                setattr(metric, state, getattr(metric, state) + share)
            metric._update_count = 1
            of_batch = metric.compute()
            _restore(metric, before)
            for state, share in shares.items():
                setattr(metric, state, getattr(metric, state) + share)
            metric._update_count += 1
            metric._computed, metric._forward_cache = None, of_batch
        for collection in self._collections:
            collection._state_is_copy = False
            collection._compute_groups_create_state_ref()
        self._updated.clear()

    def state_dict(self) -> dict[str, Any]:
        """The states of all metrics whose states are tensors."""
        return {
            name: {
                "count": metric._update_count,
                "states": {state: getattr(metric, state) for state in metric._defaults},
            }
            for name, metric in self._metrics.items()
            if all(isinstance(getattr(metric, state), Tensor) for state in metric._defaults)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        for name, stored in state_dict.items():
            metric = self._metrics[name]
            for state, value in stored["states"].items():
                setattr(metric, state, value.to(metric.device, copy=True))
            metric._update_count, metric._computed = stored["count"], None


_KEPT = ("_update_count", "_computed", "_forward_cache")


def _taken(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in (*metric._defaults, *_KEPT)}


def _restore(metric: Metric, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(metric, name, value)


def _begin(metric: Metric) -> None:
    """As `Metric.reset`, which subclasses extend, but with new lists and tensors."""
    for name, default in metric._defaults.items():
        setattr(metric, name, default.detach().clone().to(metric.device) if isinstance(default, Tensor) else [])
    metric._update_count, metric._computed, metric._forward_cache = 0, None, None


def _shares(name: str, metric: Metric, num_samples: int) -> dict[str, float]:
    """What a shard adds to the states, element by element, divided by its samples."""
    shares: dict[str, float] = {}
    for state, default in metric._defaults.items():
        if not isinstance(default, Tensor) or metric._reductions[state] is not dim_zero_sum:
            raise UsageError(
                f"the metric {name!r} ({type(metric).__name__}) was updated in training_step, and its state {state!r} "
                "is not a sum over samples, so shards cannot be added: update it in validation_step, or choose a "
                "form of it with sums (as thresholds=100 of a curve)"
            )
        share = (getattr(metric, state) - default.to(metric.device)).to(torch.float64).flatten()
        if share.numel() > _MOST_ELEMENTS:
            raise UsageError(
                f"the metric {name!r} was updated in training_step, and its state {state!r} has {share.numel()} "
                f"elements, more than {_MOST_ELEMENTS}, to be exchanged in each iteration: update it in validation_step"
            )
        shares |= {_element(name, state, i): value / num_samples for i, value in enumerate(share.tolist())}
    return shares


def _summed(totals: Mapping[str, float], name: str, metric: Metric, state: str, num_samples: int) -> Tensor:
    default = metric._defaults[state]
    values = [totals[_element(name, state, i)] * num_samples for i in range(default.numel())]
    summed = torch.tensor(values, dtype=torch.float64).view(default.shape)
    if not default.is_floating_point():
        summed = summed.round()
    return summed.to(metric.device, default.dtype)


def _element(name: str, state: str, index: int) -> str:
    return f"{_NAME}{name}/{state}/{index}"
