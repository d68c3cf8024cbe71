"""What workers told their agents, sent on for the scheduler and the monitor.

The contents mirror what a worker says over its local socket; the envelope says who it was.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .message import MAX_SLOTS, Count, Details, Id, Index, Key, Message, Positive, Text, Time


def _finite(numbers: dict[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


MAX_NUMBERS = 512
MAX_COUNTS = 2000
MAX_BATCH_STEPS = 1000
"""After this many steps of its schedule, the batch of a job stays as it is."""
Numbers = Annotated[
    dict[Annotated[str, Field(max_length=100)], float], Field(max_length=MAX_NUMBERS), AfterValidator(_finite)
]
"""Named numbers. JSON has no form for infinity and NaN, so they are left out."""
MAX_SECONDS = 1e7
"""The maximum duration of one iteration, in seconds: some months."""
MAX_SAMPLES = 10**12
"""The maximum size of one batch: more than any has, and exact in every float that is computed from it."""
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Workers = Annotated[int, Field(ge=1, le=MAX_SLOTS)]


class BatchRange(Message):
    """The global batches with which a job may train, in samples."""

    least: Samples
    most: Samples
    least_per_slot: Samples = Field(default=1, description="the fewest samples that one worker takes")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"the smallest batch, {self.least}, is larger than the largest, {self.most}")
        return self

    def __str__(self) -> str:
        return f"{self.least} to {self.most}"


class BatchStep(Message):
    """From ``iteration`` on, the global batch has ``batch_size`` samples."""

    iteration: Count
    batch_size: Samples


class Ready(Message):
    """The script has reached its training call; the worker can become a member."""

    kind: Literal["ready"] = "ready"
    iterations_total: Count
    num_shards: Positive
    batch_size: Samples
    epochs: Count
    samples: Count
    bits: Text = Field(description="'same bits', 'fast', or 'bits not guaranteed: <operation>'")
    batch_range: BatchRange | None = Field(default=None, description="null: the scheduler has no batch to choose")
    has_fixed_length: bool = Field(
        default=True, description="false: `iterations_total` is an estimate, as for a stream or with a `batch_range`"
    )

    micro_batch_size: Samples | None = Field(
        default=None,
        description="in the mode `fast`, the most samples of one forward and backward pass: a worker whose share of the"
        " batch is larger computes it in several equal ones; null: in one",
    )

    @property
    def is_fast(self) -> bool:
        """Whether it trains without regard to bits."""
        return self.bits == "fast"


class Switched(Message):
    """A generation took effect. From its lowest rank; ``iteration`` is the first that it trains."""

    kind: Literal["switched"] = "switched"
    workers: tuple[Count, ...] = Field(max_length=MAX_SLOTS)
    iteration: Count
    pause_seconds: float = 0.0


class Measurement(Message):
    """What iterations took since the last report, all with these workers and this batch: medians.

    Iterations with the short batch at the end of an epoch do not count, nor does the first of a generation.
    """

    workers: Workers
    hosts: Workers
    batch_size: Samples
    iterations: Positive = Field(description="how many were measured")
    compute_seconds: Seconds = Field(description="the time of the slowest worker: data, compute and optimizer")
    exchange_seconds: Seconds = Field(description="what an iteration took beyond that: exchange that did not overlap")


class Progress(Message):
    """What the lowest rank has committed; a few times a second at most, and at each change."""

    kind: Literal["progress"] = "progress"
    iteration: Count
    epoch: Count
    loss: float | None = None
    metrics: Numbers = Field(default_factory=dict)
    validation: Numbers = Field(default_factory=dict)
    iteration_seconds: float = 0.0
    samples_seen: Count = 0
    ends_epoch: bool = False
    iterations_total: Count | None = Field(
        default=None, description="of a job whose batch may change: how many there will be with the present batch"
    )
    measurement: Measurement | None = None
    noise_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="of the gradient, in samples: the ratio of its variance per sample to its squared norm; "
        "null: not known",
    )
    exchange_path: Text = Field(default="", description="how gradients travel, in words; empty: one worker")


class CheckpointSaved(Message):
    """A checkpoint's manifest is stored: from now on the job can resume from it."""

    kind: Literal["checkpoint"] = "checkpoint"
    lineage: Positive = Field(description="the cold start that its members descend from")
    iteration: Count
    num_bytes: Count
    pausing: bool = Field(default=False, description="training stands still at it; repeated until all workers end")


class Warned(Message):
    """Something the user should know; the job goes on."""

    kind: Literal["warned"] = "warned"
    message: Text


class EpochCount(Message):
    """How often the samples of one epoch were used by committed iterations; for several, the sums over all of them."""

    epoch: Count
    num_epochs: Positive = Field(
        default=1,
        exclude_if=lambda number: number == 1,
        description="how many epochs were counted, beginning with `epoch`; left out: one",
    )
    samples: Count
    once: Count
    more: Count
    never: Count
    as_drawn: bool | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="whether each sample was used exactly as often as a sampler drew it; left out: there is no sampler",
    )


class Completed(Message):
    """Training ended as asked. From the lowest rank once the final model is stored."""

    kind: Literal["completed"] = "completed"
    iteration: Count
    epoch: Count
    samples_seen: Count
    loss: float | None
    metrics: Numbers
    validation: Numbers
    params_sha256: str = Field(max_length=64)
    model: Key | None = Field(
        pattern=r"^models/lineage-[0-9]{1,9}\.safetensors$", description="key of the final model in the job's storage"
    )
    ledger: tuple[EpochCount, ...] = Field(max_length=MAX_COUNTS)
    bits: Text
    batches: tuple[BatchStep, ...] = Field(
        default=(),
        max_length=MAX_BATCH_STEPS,
        description="of a job that declared a range: the batch of each iteration, which its bits depend on",
    )

    def brief(self) -> "Completed":
        """Return the result without its ledger, batches, metrics and scores, which may be long."""
        return self.model_copy(update={"ledger": (), "batches": (), "metrics": {}, "validation": {}})


class Left(Message):
    """A leaver has let go: every peer confirmed its last iteration. Its slot is free once the process is gone."""

    kind: Literal["left"] = "left"
    iteration: Count


Evidence = Literal["broken link", "silence", "hearsay"]
"""Why a peer is suspected: its link broke; it was silent for ``detection_seconds``; somebody else reported it."""


class PeerSuspected(Message):
    """``suspect`` does not take part in the training any more, as this worker sees it: a suspicion, not a fact.

    The worker repeats it until a newer generation is active.
    """

    kind: Literal["peer_suspected"] = "peer_suspected"
    suspect: Count
    evidence: Evidence = Field(
        description="the link to it broke; nothing was heard from it for detection_seconds; somebody else says so"
    )
    reason: Text


class GrowthRefused(Message):
    """A worker cannot follow a larger generation, and stays in the one that it has: so do the others."""

    kind: Literal["growth_refused"] = "growth_refused"
    most_workers: Workers = Field(description="with how many it could, by its own estimate")
    message: Text


class Failed(Message):
    """A worker cannot go on. ``message`` is one line for the user, ``details`` the traceback where there is one."""

    kind: Literal["failed"] = "failed"
    message: Text
    details: Details = ""
    is_state_lost: bool = Field(
        default=False,
        description="no fault of the script: no worker has the complete state any more; the job needs its checkpoint",
    )
    is_refusal: bool = Field(
        default=False, description="the script would train wrongly, on the other workers, too, if they did not notice"
    )


Content = Annotated[
    Ready | Switched | Progress | CheckpointSaved | Warned | Completed | Left | PeerSuspected | GrowthRefused | Failed,
    Field(discriminator="kind"),
]


class Report(Message):
    """What ``worker`` of ``host`` said, as of ``generation``. Its subject ends in the content's kind."""

    job: Id
    host: Id
    incarnation: Positive
    worker: Count
    slot: Index
    generation: Count
    time: Time
    content: Content
