"""Jobs that serve: classes whose objects answer requests."""

from pydantic import Field

from .message import Message, Positive

MAX_CONCURRENCY = 1000


class Service(Message):
    """What makes a job a service. Its workers are replicas: each has an object of a class, and answers requests."""

    class_name: str = Field(max_length=200, pattern=r"^[A-Za-z_]\w*$", description="the class, in the job's script")
    concurrency: Positive = Field(
        default=1, le=MAX_CONCURRENCY, description="how many requests a replica computes at the same time"
    )
    in_flight: float | None = Field(
        default=None,
        gt=0,
        le=MAX_CONCURRENCY,
        description="how many requests a replica should have, on average; null: twice as many as it computes",
    )

    @property
    def per_replica(self) -> float:
        """The number of requests for which there should be a replica."""
        return self.in_flight or 2.0 * self.concurrency
