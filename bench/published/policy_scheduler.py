"""A scheduler policy as the scheduler of a replay: it sees what jobs have measured, and never what remains of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from resile_scheduler.policies.demand import BatchRange, Demand, Policy
from resile_scheduler.simulation.profiles import Application

from .overlapped import OverlappedThroughput, fit
from .packing import pack
from .replay import Allocation, Cluster, ReplayedJob

GROWTH = 2
"""A job may have up to this many times the workers it ever had: its fitted throughput is trusted no further."""


class PolicyScheduler:
    """Asks ``policy`` for the sizes and packs them on few nodes.

    Jobs choose their batch, but for the applications in ``fixed``, which train on one worker with that batch size.
    """

    def __init__(self, policy: Policy, *, change_seconds: float, fixed: Mapping[str, int]) -> None:
        self._policy = policy
        self._change_seconds = change_seconds
        self._fixed = fixed
        self._models: dict[str, _Model] = {}

    def decide(self, jobs: Sequence[ReplayedJob], cluster: Cluster, *, now: float) -> dict[str, Allocation]:
        """Return what the policy wants, packed."""
        self._models = {job.name: self._models.get(job.name) or _Model() for job in jobs}
        demands = [self._demand(job, number, cluster) for number, job in zip(count(1), jobs, strict=False)]
        targets = self._policy(demands, cluster.num_slots)
        nodes = pack({job.name: (job.nodes, targets[job.name].workers) for job in jobs}, cluster)
        return {
            demand.job: Allocation(nodes[demand.job], targets[demand.job].batch_size or demand.batch_size)
            for demand in demands
            if demand.job in nodes
        }

    def _demand(self, job: ReplayedJob, number: int, cluster: Cluster) -> Demand:
        application = job.arrival.application
        fixed = self._fixed.get(application.name)
        widest = max((measurement.num_workers for measurement in job.measurements), default=0)
        limit = application.largest_batch // application.smallest_local
        return Demand(
            job=job.name,
            number=number,
            priority=1,
            least=1,
            most=1 if fixed else min(max(GROWTH * widest, 1), limit),
            holds_slots=bool(job.nodes),
            assigned_workers=len(job.nodes),
            batch_size=fixed or job.allocation.batch_size or application.initial_batch,
            batch=None if fixed else _batch_range(application),
            throughput=self._models[job.name].throughput(job),
            most_measured=widest,
            noise_scale=_noise_scale(job),
            attained=job.attained,
            change_seconds=self._change_seconds,
            slots_per_host=cluster.slots_per_node,
        )


@dataclass
class _Model:
    """What was fitted to a job's measurements, and to how many."""

    fitted: OverlappedThroughput | None = None
    num_measurements: int = 0

    def throughput(self, job: ReplayedJob) -> OverlappedThroughput | None:
        if len(job.measurements) > self.num_measurements:
            application = job.arrival.application
            self.num_measurements = len(job.measurements)
            self.fitted = fit(
                list(job.measurements), initial=application.initial_batch, largest_local=application.largest_local
            )
        return self.fitted


def _batch_range(application: Application) -> BatchRange:
    return BatchRange(application.initial_batch, application.largest_batch, least_per_slot=application.smallest_local)


def _noise_scale(job: ReplayedJob) -> float | None:
    squared, variance = job.gradient
    if not job.measurements:
        return None
    return variance / squared * job.arrival.application.initial_batch if squared else math.inf
