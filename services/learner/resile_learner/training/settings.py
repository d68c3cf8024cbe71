"""The settings of a training call, and what must be equal on all workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from resile_shared.errors import UsageError

from ..devices import device_class
from ..state.facts import Facts
from .digest import dataset_digest, params_sha256
from .torch_settings import script_settings

Mode = Literal["same-bits", "fast"]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings that must be the same on every worker. Raises UsageError for values that cannot work."""

    epochs: int
    batch_size: int
    num_shards: int
    seed: int
    mode: Mode
    threads: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UsageError(f"epochs is {self.epochs}: use 1 or more")
        if self.mode not in ("same-bits", "fast"):
            raise UsageError(f'mode is {self.mode!r}: use "same-bits" or "fast"')


def facts_of(
    settings: TrainingSettings, more: Mapping[str, Any], *, model: nn.Module, dataset: Any, num_validation_samples: int
) -> Facts:
    """Collect the facts of a run before its first iteration; ``more`` are further settings that must be equal."""
    facts = {name: str(value) for name, value in {**vars(settings), **more}.items()}
    facts["samples"] = str(len(dataset))
    facts["dataset"] = dataset_digest(dataset)
    facts["validation_samples"] = str(num_validation_samples)
    facts["initial_model"] = params_sha256(model)
    if settings.mode == "same-bits":
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        facts["device_class"] = device_class(device)
        facts.update(script_settings())
    return facts
