"""Caches what policies compute from one job alone, until the job's demand changes."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from .demand import Demand

MOST_JOBS = 16384
"""Results are cached for at most this many jobs."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def newest(
    function: Callable[Concatenate[Demand, Arguments], Result],
) -> Callable[Concatenate[Demand, Arguments], Result]:
    """Return ``function`` with a cache of its newest result for each job.

    The result is reused for the identical demand, not for an equal one, and for equal other arguments. It must depend
    on nothing else.
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
