"""Which processes a pool on this machine consists of, and how each is started."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from resile_shared.nats_server import NatsServer

from .home import PoolHome

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class PoolOptions:
    """What `resile up` was asked for."""

    hosts: int = 1
    slots: int | None = None
    """Of each host; None: all devices of this machine for one host, its cores shared among several."""
    port: int = 0
    listen: str = ADDRESS
    storage: str | None = None
    """URL of the object storage; None: that of last time, at first a folder of the home."""
    policy: Literal["fairshare", "priority"] = "fairshare"
    detection_seconds: float = 3.0
    """Silence after which somebody is lost."""
    open_to_chaos: bool = False
    """Whether `resile chaos` may attack it."""

    @property
    def slots_per_host(self) -> int | None:
        """Slots of each host; None: its agent finds out."""
        if self.slots is None and self.hosts > 1:
            return max(1, len(os.sched_getaffinity(0)) // self.hosts)
        return self.slots


@dataclass(frozen=True)
class ServiceSpec:
    """How one process is started: ``python -m module`` with ``arguments``, its log, and where it tells its health."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log: Path
    health: Path


def registry(home: PoolHome, bus: NatsServer, options: PoolOptions) -> ServiceSpec:
    """Return the registry."""
    return _spec("registry", "resile_registry", "registry", home, bus, *_detection(options))


def scheduler(home: PoolHome, bus: NatsServer, options: PoolOptions) -> ServiceSpec:
    """Return the scheduler."""
    flags = ("--policy", options.policy, *_detection(options))
    return _spec("scheduler", "resile_scheduler", "scheduler", home, bus, *flags)


def monitor(home: PoolHome, bus: NatsServer, options: PoolOptions, *, port: int) -> ServiceSpec:
    """Return the monitor; its API listens on ``port``, 0 for any."""
    api = ("--api-host", options.listen, "--api-port", str(port), "--url-file", str(home.api_file))
    guarded = ("--token-file", str(home.token_file), "--storage", home.storage(options.storage))
    return _spec("monitor", "resile_monitor", "monitor", home, bus, *api, *guarded)


def agents(home: PoolHome, bus: NatsServer, options: PoolOptions) -> list[ServiceSpec]:
    """Return the agent of each host: host-1, host-2, ..."""
    slots = ("--slots", str(options.slots_per_host)) if options.slots_per_host else ()
    shared = ("--address", ADDRESS, "--storage", home.storage(options.storage), *slots, *_detection(options))
    return [
        _spec(name, "resile_learner", "learner", home, bus, "--host", name, "--folder", str(home.host(name)), *shared)
        for name in (f"host-{number}" for number in range(1, options.hosts + 1))
    ]


def _detection(options: PoolOptions) -> tuple[str, str]:
    return ("--detection-seconds", f"{options.detection_seconds:g}")


def _spec(name: str, module: str, role: str, home: PoolHome, bus: NatsServer, *arguments: str) -> ServiceSpec:
    health = home.health(name)
    return ServiceSpec(
        name=name,
        module=module,
        arguments=(
            *("--credentials", str(bus.credentials(role))),
            *("--health-port", "0", "--health-file", str(health)),
            *arguments,
        ),
        log=home.log(name),
        health=health,
    )
