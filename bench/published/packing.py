"""Places workers on few nodes."""

from collections import Counter
from collections.abc import Collection, Mapping

from .replay import Cluster, Nodes

Wanted = Mapping[str, tuple[Nodes, int]]
"""What each job holds, and how many workers it should have."""


def pack(wanted: Wanted, cluster: Cluster) -> dict[str, Nodes]:
    """Return the nodes of each job that should have workers; all must fit.

    A job keeps its nodes if its number of workers stays and they are as few nodes as can be. The others are placed
    again, the largest first: on whole nodes, and what is left on the node with the least room for it. If one of them
    would be spread over more nodes than it needs, small jobs make room: those of the node where fewest workers move.
    """
    kept = {
        job: held
        for job, (held, workers) in wanted.items()
        if workers and len(held) == workers and not _is_spread(held, cluster)
    }
    while True:
        placed = _place(wanted, kept, cluster)
        moving = _making_room(kept, cluster) if any(_is_spread(nodes, cluster) for nodes in placed.values()) else ()
        if not moving:
            return placed
        for job in moving:
            del kept[job]


def _is_spread(nodes: Nodes, cluster: Cluster) -> bool:
    return len(set(nodes)) > -(-len(nodes) // cluster.slots_per_node)


def _making_room(kept: Mapping[str, Nodes], cluster: Cluster) -> Collection[str]:
    """Return the jobs of one node that do not fill it: the node where their workers are fewest."""
    small = {job: nodes[0] for job, nodes in kept.items() if len(nodes) < cluster.slots_per_node}
    workers = Counter(node for job in small for node in kept[job])
    if not workers:
        return ()
    node = min(workers, key=lambda node: (workers[node], node))
    return [job for job, at in small.items() if at == node]


def _place(wanted: Wanted, kept: Mapping[str, Nodes], cluster: Cluster) -> dict[str, Nodes]:
    placed = dict(kept)
    free = cluster.free(placed.values())
    changed = [job for job, (_, workers) in wanted.items() if workers and job not in placed]
    for job in sorted(changed, key=lambda job: -wanted[job][1]):
        held, workers = wanted[job]
        placed[job] = _choose(free, workers, cluster.slots_per_node, frozenset(held))
    return placed


def _choose(free: list[int], workers: int, slots_per_node: int, held: frozenset[int]) -> Nodes:
    """Take ``workers`` slots of ``free``."""
    chosen: list[int] = []
    while len(chosen) < workers:
        missing = min(workers - len(chosen), slots_per_node)
        roomy = [node for node, room in enumerate(free) if room >= missing]
        if roomy:
            node = min(roomy, key=lambda node: (free[node], node not in held, node))
        else:
            node = max(range(len(free)), key=lambda node: (free[node], node in held, -node))
        number = min(free[node], missing)
        chosen += [node] * number
        free[node] -= number
    return tuple(sorted(chosen))
