"""Published schedulers to compare with, on the static requests of a workload."""

from collections.abc import Mapping, Sequence

from .replay import Allocation, Cluster, Nodes, ReplayedJob

DEMOTION_SLOT_SECONDS = 16 * 3600.0
"""The slot-seconds that a job has attained when it leaves Tiresias' first queue."""


class Tiresias:
    """Discretised least attained service with two queues (Gu et al., NSDI 2019, section 3).

    Each job is a gang of the requested workers. The first queue goes before the second, and in each the job that came
    first. A job is preempted when those before it need its slots; a small one may pass a large one that does not fit.
    """

    def __init__(self, *, demotion_slot_seconds: float = DEMOTION_SLOT_SECONDS) -> None:
        self._demotion = demotion_slot_seconds
        self._second: dict[str, None] = {}
        """The jobs of the second queue, in the order in which they entered it."""

    def decide(self, jobs: Sequence[ReplayedJob], cluster: Cluster, *, now: float) -> dict[str, Allocation]:
        """Admit gangs in the order of the queues."""
        by_name = {job.name: job for job in jobs}
        self._second = {name: None for name in self._second if name in by_name}
        self._second |= {job.name: None for job in jobs if job.attained >= self._demotion}
        first = [job for job in jobs if job.name not in self._second]
        free = cluster.num_slots
        admitted = []
        for job in (*first, *(by_name[name] for name in self._second)):
            if job.arrival.workers <= free:
                free -= job.arrival.workers
                admitted.append(job)
        placed = spread({job.name: (job.nodes, job.arrival.workers) for job in admitted}, cluster)
        return {job.name: Allocation(placed[job.name], job.arrival.batch_size) for job in admitted}


def spread(wanted: Mapping[str, tuple[Nodes, int]], cluster: Cluster) -> dict[str, Nodes]:
    """Place jobs that hold nothing on the emptiest nodes, one after the other; a job that holds some keeps them.

    ``wanted`` has for each job what it keeps and how many workers it should have, which must fit.
    """
    allocations = {job: nodes for job, (nodes, _) in wanted.items() if nodes}
    free = cluster.free(allocations.values())
    for job, (nodes, workers) in wanted.items():
        if nodes:
            continue
        placed: list[int] = []
        while len(placed) < workers:
            node = max(range(cluster.num_nodes), key=lambda n: free[n])
            number = min(free[node], workers - len(placed))
            placed += [node] * number
            free[node] -= number
        allocations[job] = tuple(placed)
    return allocations
