"""What policies compute of one job alone: it is kept until the job's demand is another one."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from .demand import Demand

MOST_JOBS = 16384
"""For which results are kept."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def newest(
    function: Callable[Concatenate[Demand, Arguments], Result],
) -> Callable[Concatenate[Demand, Arguments], Result]:
    """Return ``function``, which keeps its newest result for each job.

    That is the result for this very demand, not for an equal one, and for equal other arguments. It must depend on
    nothing else.
    """
    known: dict[str, tuple[Demand, object, object, Result]] = {}

    @wraps(function)
    def keeping(demand: Demand, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        found = known.get(demand.job)
        if found is not None and found[0] is demand and found[1] == args and found[2] == kwargs:
            return found[3]
        if len(known) >= MOST_JOBS:
            known.clear()
        result = function(demand, *args, **kwargs)
        known[demand.job] = demand, args, kwargs, result
        return result

    return keeping
