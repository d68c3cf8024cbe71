"""What is submitted to a simulated pool, and when."""

from dataclasses import dataclass

from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.reports import Ready


@dataclass(frozen=True)
class Submission:
    """A job that is submitted ``time`` seconds after the start and trains ``iterations``.

    A shard takes ``shard_seconds``; a checkpoint is saved after each ``checkpoint_every`` iterations, None: never.
    """

    time: float
    job: str
    spec: JobSpec
    iterations: int
    num_shards: int = 24
    shard_seconds: float = 0.01
    checkpoint_every: int | None = None
    bits: str = "same bits"

    def ready(self) -> Ready:
        """Return what its workers report at their training call."""
        return Ready(
            iterations_total=self.iterations,
            num_shards=self.num_shards,
            batch_size=self.num_shards * 8,
            epochs=1,
            samples=self.num_shards * 8 * self.iterations,
            bits=self.bits,
        )
