"""The settings of a training call, and what must be equal on all workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from resile_shared.errors import UsageError
from resile_shared.messages.reports import MAX_SAMPLES

from ..devices import device_class
from ..state.facts import Facts
from .data.stream_reader import is_stream
from .digest import dataset_digest, params_sha256
from .known_probes import KnownProbes
from .learning_rate import RULES, LearningRateRule
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
    batch_range: tuple[int, int] | None = None
    learning_rate_rule: LearningRateRule = "linear"

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UsageError(f"epochs is {self.epochs}: use 1 or more")
        if self.mode not in ("same-bits", "fast"):
            raise UsageError(f'mode is {self.mode!r}: use "same-bits" or "fast"')
        if self.learning_rate_rule not in RULES:
            raise UsageError(f'learning_rate_rule is {self.learning_rate_rule!r}: use "linear", "sqrt" or "none"')
        if self.batch_range is not None:
            self._check_range(self.batch_range)

    def _check_range(self, batch_range: tuple[int, int]) -> None:
        least, most = batch_range
        if not 1 <= least <= self.batch_size <= most:
            raise UsageError(
                f"batch_range is {batch_range} and batch_size {self.batch_size}: the range is (least, most), and "
                "batch_size, with which training starts, lies in it"
            )
        if most > MAX_SAMPLES:
            raise UsageError(f"batch_range is {batch_range}: its most is {MAX_SAMPLES} or less")


def facts_of(
    settings: TrainingSettings,
    more: Mapping[str, Any],
    *,
    model: nn.Module,
    dataset: Any,
    num_validation_samples: int,
    known_probes: Path | None = None,
) -> Facts:
    """Collect the facts of a run before its first iteration; ``more`` are further settings that must be equal.

    ``known_probes`` is the folder in which the job's workers on this host share the outcome of the probe.
    """
    facts = {name: str(value) for name, value in {**vars(settings), **more}.items()}
    if is_stream(dataset):  # compared as it is read
        facts["dataset"] = type(dataset).__name__
    else:
        facts["samples"] = str(len(dataset))
        facts["dataset"] = dataset_digest(dataset)
    facts["validation_samples"] = str(num_validation_samples)
    facts["initial_model"] = params_sha256(model)
    if settings.mode == "same-bits":
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        of_torch = script_settings()
        facts["device_class"] = device_class(device, KnownProbes(known_probes, of_torch).digest)
        facts.update(of_torch)
    return facts
