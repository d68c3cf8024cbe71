"""The workers of a world: simulated ones on every host, and the faults of their links and of the storage."""

import random
from collections.abc import Callable
from typing import Any

from resile_learner.messages import WorkerConfig

from .loop import Process
from .plan import Fault, Script
from .services import Host
from .training import Commit, SimScript
from .worker import SimCluster, SimForkServer, SimWorker
from .world import World

MAX_EPOCH = 10
"""Iterations in an epoch, at the most."""


class SimWorkers:
    """Implements `Workers`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cluster = SimCluster(world.loop, random.Random(f"{world.plan.seed} workers"), script_of=_script_of)
        self.cluster.on_commit = self._on_commit
        self.cluster.on_start = self._on_start
        self.cluster.on_end = self._on_end
        self._faults: dict[str, Callable[[Fault], bool]] = {
            "cut pair": lambda fault: self._cut(fault, ("control", "data"), both_ways=True),
            "cut pair one way": lambda fault: self._cut(fault, ("control", "data"), both_ways=False),
            "cut data": lambda fault: self._cut(fault, ("data",), both_ways=True),
            "cut control": lambda fault: self._cut(fault, ("control",), both_ways=True),
            "cut storage": self._cut_storage,
            "storage fails": lambda fault: self._storage(fault, "failing", 0.5),
            "storage is slow": lambda fault: self._storage(fault, "seconds", 1.0),
            "storage is ambiguous": lambda fault: self._storage(fault, "ambiguous", 0.3),
            "storage is stale": lambda fault: self._storage(fault, "stale", 0.5),
            "storage is full": lambda fault: self._storage(fault, "is_full", True),
        }
        self._healthy = {name: getattr(self.cluster.objects, name) for name in _STORAGE}

    def fork_server(self, host: Host) -> SimForkServer:
        return SimForkServer(self.cluster, host.host, is_host_lost=lambda: not host.is_wanted)

    def processes(self, host: str | None = None) -> list[Process]:
        living = [worker.process for _, worker in sorted(self.cluster.living.items())]
        return [process for process in living if host in (None, process.host)]

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """What takes the place of the product's own while the world runs."""
        return self.cluster.replacements()

    def begin_fault(self, fault: Fault) -> bool:
        return self._faults[fault.kind](fault)

    def heal(self) -> None:
        self.cluster.network.heal()
        self.cluster.objects.cut_hosts.clear()
        for name, value in self._healthy.items():
            setattr(self.cluster.objects, name, value)

    def check_end(self) -> None:
        pass

    def _cut(self, fault: Fault, kinds: tuple[str, ...], *, both_ways: bool) -> bool:
        hosts = sorted(self._world.hosts)
        one, other = hosts[fault.target % len(hosts)], hosts[(fault.target // 7) % len(hosts)]
        network = self.cluster.network
        network.cut(one, other, kinds)
        if both_ways:
            network.cut(other, one, kinds)
        self._world.loop.call_later(fault.seconds, network.heal)
        return True

    def _cut_storage(self, fault: Fault) -> bool:
        hosts = sorted(self._world.hosts)
        host = hosts[fault.target % len(hosts)]
        self.cluster.objects.cut_hosts.add(host)
        self._world.loop.call_later(fault.seconds, self.cluster.objects.cut_hosts.discard, host)
        return True

    def _storage(self, fault: Fault, name: str, value: object) -> bool:
        setattr(self.cluster.objects, name, value)
        self._world.loop.call_later(fault.seconds, setattr, self.cluster.objects, name, self._healthy[name])
        return True

    def _on_commit(self, commit: Commit) -> None:
        chain = (commit.iteration, commit.chain, commit.spans)
        self._world.checks.committed(commit.job, commit.start, commit.round, commit.worker, chain)

    def _on_start(self, worker: SimWorker) -> None:
        self._world.checks.worker_started(worker.config.job, worker.config.worker, worker.process.host)

    def _on_end(self, worker: SimWorker) -> None:
        self._world.checks.worker_ended(worker.config.job, worker.config.worker)


_STORAGE = ("failing", "seconds", "ambiguous", "stale", "is_full")


def _script_of(config: WorkerConfig) -> SimScript:
    script = Script.of_args(config.args)
    per_epoch = next(n for n in range(MAX_EPOCH, 0, -1) if script.iterations % n == 0)
    return SimScript(
        num_samples=per_epoch * script.num_shards,
        batch_size=script.num_shards,
        num_shards=script.num_shards,
        epochs=script.iterations // per_epoch,
        shard_seconds=script.shard_seconds,
        import_seconds=script.ready_seconds,
        checkpoint_every=script.checkpoint_every or None,
        raises_at=script.fails_at,
        hangs_at=script.hangs_at,
        differs=script.differs,
    )
