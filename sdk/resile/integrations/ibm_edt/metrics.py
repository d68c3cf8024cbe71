"""Metrics of a batch: accuracy as the platform has it, and those that a script names."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from resile_shared.errors import UsageError

Metric = Callable[[Any, Any], Any]


def accuracy(outputs: Any, targets: Any) -> float:
    """Percent of the rows of ``outputs`` (N, classes) whose largest value is at its class in ``targets`` (N)."""
    return 100.0 * float((outputs.argmax(1) == targets).float().mean())


def has_accuracy(outputs: Any, targets: Any) -> bool:
    """Whether these are scores of classes and classes."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return False
    is_of_classes = outputs.ndim == 2 and targets.ndim == 1 and len(outputs) == len(targets)
    return is_of_classes and not targets.is_floating_point()


def evaluate(outputs: Any, targets: Any) -> float:
    """The argument ``eva`` of a script's own step: the accuracy in percent, 0 if there is none."""
    return accuracy(outputs, targets) if has_accuracy(outputs, targets) else 0.0


def named_metrics(metrics: Any) -> dict[str, Metric]:
    """The functions of outputs and targets that ``metrics`` names; none given: accuracy, where there is one.

    Raises UsageError for anything else than functions, by name or with names of their own, and "accuracy".
    """
    if metrics is None:
        return {}
    named = metrics if isinstance(metrics, Mapping) else {_name(each): each for each in _several(metrics)}
    result: dict[str, Metric] = {}
    for name, metric in named.items():
        if metric in ("accuracy", "acc"):
            result[str(name)] = accuracy
        elif callable(metric):
            result[str(name)] = metric
        else:
            raise UsageError(
                f"FabricModel was given the metric {metric!r}: give functions of outputs and targets, or 'accuracy'"
            )
    return result


def _several(metrics: Any) -> list[Any]:
    return list(metrics) if isinstance(metrics, list | tuple) else [metrics]


def _name(metric: Any) -> str:
    return metric if isinstance(metric, str) else str(getattr(metric, "__name__", type(metric).__name__))
