"""The policies by name, and the one of a pool that is about to stop."""

from collections.abc import Sequence

from resile_shared.policies import PolicyName

from .demand import Demand, Policy, Target
from .fairshare import fairshare
from .priority import priority

POLICIES: dict[PolicyName, Policy] = {PolicyName.FAIRSHARE: fairshare, PolicyName.PRIORITY: priority}


def no_slots(demands: Sequence[Demand], _: int) -> dict[str, Target]:
    """Nothing for any job: the pool is about to stop."""
    return {demand.job: Target(0, "the pool is stopping: it continues when the pool is up again") for demand in demands}
