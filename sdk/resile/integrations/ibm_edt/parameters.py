"""The parameters that the platform's user interface holds for a script: here they are variables of the job."""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from resile_shared.errors import UsageError

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def getTrainData(*arguments: Any) -> str:  # noqa: N802 - these names are the platform's
    """Return the path of the training data: EDT_TRAIN_DATA, or DATA_DIR."""
    return _data("EDT_TRAIN_DATA")


def getTestData(*arguments: Any) -> str:  # noqa: N802
    """Return the path of the test data: EDT_TEST_DATA, or DATA_DIR."""
    return _data("EDT_TEST_DATA")


def getValData(*arguments: Any) -> str:  # noqa: N802
    """Return the path of the validation data: EDT_VAL_DATA, or DATA_DIR."""
    return _data("EDT_VAL_DATA")


def getEpoch() -> int:  # noqa: N802
    """Return the number of epochs: ``--epochs`` of the script, or EDT_EPOCHS."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--epochs")
    given = parser.parse_known_args()[0].epochs
    return int(given) if given else int(_number("EDT_EPOCHS", "getEpoch"))


def getTrainBatchSize() -> int:  # noqa: N802
    """Return the batch size of one engine: EDT_BATCH_SIZE."""
    return int(_number("EDT_BATCH_SIZE", "getTrainBatchSize"))


def getTestBatchSize() -> int:  # noqa: N802
    """Return the batch size of a test: EDT_TEST_BATCH_SIZE, or that of training."""
    return int(os.environ.get("EDT_TEST_BATCH_SIZE") or getTrainBatchSize())


def getOptimizer(model: nn.Module) -> torch.optim.Optimizer:  # noqa: N802
    """Return the optimizer that EDT_OPTIMIZER names, with EDT_LEARNING_RATE, EDT_MOMENTUM and EDT_WEIGHT_DECAY."""
    name = os.environ.get("EDT_OPTIMIZER", "sgd").lower()
    if name not in OPTIMIZERS:
        raise UsageError(f"EDT_OPTIMIZER is {name!r}: use one of {', '.join(OPTIMIZERS)}")
    options: dict[str, Any] = {"lr": _number("EDT_LEARNING_RATE", "getOptimizer")}
    for variable, option in (("EDT_MOMENTUM", "momentum"), ("EDT_WEIGHT_DECAY", "weight_decay")):
        if variable in os.environ:
            options[option] = _number(variable, "getOptimizer")
    if "momentum" in options and name not in ("sgd", "rmsprop"):
        raise UsageError(f"EDT_MOMENTUM is set, and the optimizer {name} has no momentum: leave it out")
    return OPTIMIZERS[name](model.parameters(), **options)


def getLearningRate(optimizer: torch.optim.Optimizer) -> float:  # noqa: N802
    """Return the learning rate of ``optimizer``."""
    return float(optimizer.param_groups[0]["lr"])


def _data(variable: str) -> str:
    path = os.environ.get(variable) or os.environ.get("DATA_DIR")
    if not path:
        raise UsageError(f"the script asks for its data, and neither {variable} nor DATA_DIR is set: use --env")
    return path


def _number(variable: str, asked: str) -> float:
    text = os.environ.get(variable)
    if not text:
        raise UsageError(
            f"the script asks pth_parameter_mgr.{asked}(), which the platform's user interface sets: give it by "
            f"`--env {variable}=...`"
        )
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{variable} is {text!r}: give a number") from None
