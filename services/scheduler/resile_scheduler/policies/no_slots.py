"""The policy of a pool that is about to stop."""

from collections.abc import Sequence

from .demand import Demand, Target


def no_slots(demands: Sequence[Demand], _: int) -> dict[str, Target]:
    """Nothing for any job: the pool is about to stop."""
    return {demand.job: Target(0, "the pool is stopping: it continues when the pool is up again") for demand in demands}
