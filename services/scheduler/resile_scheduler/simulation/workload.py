"""What is submitted to a simulated pool, and when."""

from dataclasses import dataclass

from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.reports import Ready

from .training import Training


@dataclass(frozen=True)
class Submission:
    """A job that is submitted ``time`` seconds after the start.

    While it trains, a checkpoint is saved after each ``checkpoint_seconds``; None: never.
    """

    time: float
    job: str
    spec: JobSpec
    training: Training
    checkpoint_seconds: float | None = None
    bits: str = "same bits"

    def ready(self) -> Ready:
        """Return what its workers report at their training call."""
        training = self.training
        return Ready(
            iterations_total=training.iterations_total,
            num_shards=training.num_shards,
            batch_size=training.batch_size,
            epochs=1,
            samples=training.batch_size * training.iterations_total,
            bits=self.bits,
        )
