"""The settings of a training call, and what must be equal on all workers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from resile_shared.errors import UsageError
from resile_shared.messages.reports import MAX_SAMPLES

from ..devices import device_class
from ..state.facts import Facts
from .data.batch_samplers import BatchSampler
from .data.batches import BatchPlan
from .data.fetch import Collate
from .data.samplers import Sampler, order_digest
from .data.stream_reader import is_stream
from .digest import dataset_digest, params_sha256
from .known_probes import KnownProbes
from .learning_rate import RULES, LearningRateRule
from .torch_settings import script_settings
from .validation import Validation

Mode = Literal["same-bits", "fast"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of a training call: see `ElasticLoop`. Raises UsageError for values that cannot work."""

    epochs: int = 1
    batch_size: int = 64
    batch_range: tuple[int, int] | None = None
    learning_rate_rule: LearningRateRule = "linear"
    num_shards: int | None = None
    seed: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    validation: Validation | None = None
    collate_fn: Collate | None = None
    num_workers: int = 0
    worker_init_fn: Callable[[int], object] | None = None
    """Called in each of the ``num_workers`` processes that read samples, with its number."""
    checkpoint_every: int | str | None = None
    mode: Mode = "same-bits"
    micro_batch_size: int | None = None
    threads: int = 1
    recompute: bool = False
    shuffle: bool = True
    drop_last: bool = False
    sampler: Sampler | None = None
    batch_sampler: BatchSampler | None = None
    max_iterations: int | None = None
    weighs_by_samples: bool = False
    """Whether shards are batches of the script, whose losses count alike whatever weights they have."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UsageError(f"epochs is {self.epochs}: use 1 or more")
        if self.mode not in ("same-bits", "fast"):
            raise UsageError(f'mode is {self.mode!r}: use "same-bits" or "fast"')
        if self.learning_rate_rule not in RULES:
            raise UsageError(f'learning_rate_rule is {self.learning_rate_rule!r}: use "linear", "sqrt" or "none"')
        for name, part in self.state.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(
                    f"state has {name!r}, a {type(part).__name__} without state_dict() and load_state_dict(): keep "
                    f"what changes in a resile.training.State, as in state={{{name!r}: State(best=0.0)}}"
                )
        if self.micro_batch_size is not None and not self.is_fast:
            raise UsageError(
                f'micro_batch_size is {self.micro_batch_size}, and mode is "same-bits", where each shard is one '
                "forward and backward pass: choose num_shards such that a shard of the largest batch fits, and leave "
                "micro_batch_size out"
            )

    @property
    def is_fast(self) -> bool:
        """Whether the bits may depend on the number of workers."""
        return self.mode == "fast"

    def facts(self, plan: BatchPlan) -> dict[str, object]:
        """Return the settings that must be equal on all workers; batch and shards are those of ``plan``."""
        return {
            "epochs": self.epochs,
            "batch_size": plan.batch_size,
            "num_shards": plan.num_shards,
            "seed": self.seed,
            "mode": self.mode,
            "threads": self.threads,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "batch_range": self.batch_range,
            "learning_rate_rule": self.learning_rate_rule,
            "sampler": order_digest(plan),
            "max_iterations": self.max_iterations,
        }

    def check_batch_range(self) -> None:
        """Raise UsageError if ``batch_range`` cannot work; a stream and a batch sampler can have none."""
        if self.batch_range is None:
            return
        least, most = self.batch_range
        if not 1 <= least <= self.batch_size <= most:
            raise UsageError(
                f"batch_range is {self.batch_range} and batch_size {self.batch_size}: the range is (least, most), and "
                "batch_size, with which training starts, lies in it"
            )
        if most > MAX_SAMPLES:
            raise UsageError(f"batch_range is {self.batch_range}: its most is {MAX_SAMPLES} or less")


def facts_of(
    settings: Mapping[str, object],
    *,
    model: nn.Module,
    dataset: Any,
    num_validation_samples: int,
    is_fast: bool,
    known_probes: Path | None = None,
) -> Facts:
    """Collect the facts of a run before its first iteration, beside the ``settings`` that must be equal.

    ``known_probes`` is the folder in which the job's workers on this host share the outcome of the probe.
    """
    facts = {name: str(value) for name, value in settings.items()}
    if is_stream(dataset):  # compared as it is read
        facts["dataset"] = type(dataset).__name__
    else:
        facts["samples"] = str(len(dataset))
        facts["dataset"] = dataset_digest(dataset)
    facts["validation_samples"] = str(num_validation_samples)
    facts["initial_model"] = params_sha256(model)
    if not is_fast:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        of_torch = script_settings()
        facts["device_class"] = device_class(device, KnownProbes(known_probes, of_torch).digest)
        facts.update(of_torch)
    return facts
