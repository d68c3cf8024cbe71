"""Finds metrics that only some shards of a global batch have: they are averaged over all of its samples."""

from collections.abc import Collection, Sequence

from ..collectives.tree import Interval

_MOST_NAMED = 5


def find_partial_metric(given: Sequence[tuple[Interval, Collection[str]]]) -> str:
    """Say which metric only some shards have, where ``given`` names those of each range of shards; empty if none."""
    for name in sorted({name for _, names in given for name in names}):
        without = [shard for shards, names in given if name not in names for shard in range(*shards)]
        if without:
            having = [shard for shards, names in given if name in names for shard in range(*shards)]
            return (
                f"the metric {name} was given for {_listed(having)} and not for {_listed(without)} of a global batch: "
                "metrics are averaged over all of its samples, so give each of them for every shard, or for none"
            )
    return ""


def _listed(shards: Sequence[int]) -> str:
    named = ", ".join(map(str, shards[:_MOST_NAMED])) + (", ..." if len(shards) > _MOST_NAMED else "")
    return f"shard {named}" if len(shards) == 1 else f"shards {named}"
