"""Which processes a pool on this machine consists of, and how each is started."""

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from resile_learner.datasets.host_datasets import MAX_BYTES
from resile_shared.bus.nats_server import NatsServer
from resile_shared.control_groups import num_processors
from resile_shared.messages.pool import DEFAULT_KEEP_DAYS, DEFAULT_KEEP_JOBS
from resile_shared.policies import PolicyName

from .home import PoolHome
from .namespaces import Namespaces

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class PoolOptions:
    """The options of `resile up`."""

    hosts: int = 1
    slots: int | None = None
    """Slots of each host; None: all devices of this machine for one host, its cores shared among several."""
    data_cache_bytes: int = MAX_BYTES
    """Disk space that fetched datasets may take on each host."""
    port: int = 0
    listen: str = ADDRESS
    storage: str | None = None
    """URL of the object storage; None: the one used last, at first a folder in the home."""
    policy: PolicyName | None = None
    """How jobs share slots from now on; None: as chosen last."""
    preemption: bool | None = None
    """Whether a job may lose slots to another one; None: as chosen last."""
    detection_seconds: float = 3.0
    """Seconds of silence after which a host or worker is lost."""
    grace_seconds: float = 120.0
    """How long jobs may take to save a checkpoint when the pool stops."""
    keep_jobs: int = DEFAULT_KEEP_JOBS
    """The number of ended jobs that are kept."""
    keep_days: float = DEFAULT_KEEP_DAYS
    """Days for which ended jobs and departed hosts are kept."""
    trace_url: str = ""
    """Where a collector shows a trace, with ``{trace}`` for its id; empty: nowhere."""
    open_to_chaos: bool = False
    """Whether `resile chaos` may attack the pool."""
    namespaces: bool = False
    """Whether each part has a network namespace of its own."""

    @property
    def slots_per_host(self) -> int | None:
        """Slots of each host; None: the agent detects them."""
        if self.slots is None and self.hosts > 1:
            return max(1, num_processors() // self.hosts)
        return self.slots

    @property
    def host_names(self) -> list[str]:
        """The hosts on this machine."""
        return [f"host-{number}" for number in range(1, self.hosts + 1)]

    @property
    def is_open(self) -> bool:
        """Whether other machines can join."""
        return not ip_address(self.listen).is_loopback

    @property
    def reached_at(self) -> str:
        """The address of the API and the bus for other machines."""
        return outward_address() if ip_address(self.listen).is_unspecified else self.listen

    @property
    def workers_at(self) -> str:
        """The address of the workers here for those on other hosts: workers listen on IPv4 only."""
        if not self.is_open:
            return ADDRESS
        return outward_address() if ":" in self.listen else self.reached_at


@dataclass(frozen=True)
class ServiceSpec:
    """How one process is started: ``python -m module`` with ``arguments``, its log, and its health file."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log: Path
    health: Path
    prefix: tuple[str, ...] = ()
    """Words put before the command, such as ``nsenter``, which replaces itself with the command."""


class Services:
    """The processes of one pool, in ``namespaces`` or in the network of this machine."""

    def __init__(self, home: PoolHome, options: PoolOptions, namespaces: Namespaces | None = None) -> None:
        self._home = home
        self._options = options
        self._namespaces = namespaces
        host = self._address("bus") if namespaces else options.listen
        self.bus = NatsServer(home.bus, host=host, prefix=self._prefix("bus"))

    @staticmethod
    def part_names(options: PoolOptions) -> list[str]:
        """Return the names of the processes, which are also those of their namespaces."""
        return ["bus", "registry", "scheduler", "monitor", *options.host_names]

    def registry(self) -> ServiceSpec:
        """Return the registry."""
        keeping = ("--keep-jobs", str(self._options.keep_jobs), "--keep-days", f"{self._options.keep_days:g}")
        return self._spec("registry", "resile_registry", "registry", *self._detection, *keeping)

    def scheduler(self, *, is_first: bool) -> ServiceSpec:
        """Return the scheduler; only the first one of this pool is given a policy, later ones keep what is chosen."""
        policy, preemption = self._options.policy, self._options.preemption
        chosen = (
            *(("--policy", policy) if is_first and policy is not None else ()),
            *(("--preemption", str(preemption).lower()) if is_first and preemption is not None else ()),
        )
        return self._spec(
            "scheduler", "resile_scheduler", "scheduler", *self._detection, *chosen, "--storage", self._storage
        )

    def monitor(self, *, port: int) -> ServiceSpec:
        """Return the monitor; its API listens on ``port``, 0 for any."""
        host = self._address("monitor") if self._namespaces else self._options.listen
        api = ("--api-host", host, "--api-port", str(port), "--url-file", str(self._home.api_file))
        guarded = ("--token-file", str(self._home.token_file), "--storage", self._storage)
        joining = ("--agent-credentials", str(self.bus.credentials("learner"))) if self._options.is_open else ()
        linked = ("--trace-url", self._options.trace_url) if self._options.trace_url else ()
        return self._spec("monitor", "resile_monitor", "monitor", *api, *guarded, *joining, *linked)

    def agents(self) -> list[ServiceSpec]:
        """Return the agent of each host: host-1, host-2, ..."""
        return [self._agent(name) for name in self._options.host_names]

    def _agent(self, name: str) -> ServiceSpec:
        options = self._options
        slots = ("--slots", str(options.slots_per_host)) if options.slots_per_host else ()
        cache = ("--data-cache-bytes", str(options.data_cache_bytes))
        address = self._address(name) if self._namespaces else options.workers_at
        place = ("--host", name, "--folder", str(self._home.host(name)), "--address", address)
        return self._spec(
            name, "resile_learner", "learner", *place, "--storage", self._storage, *slots, *cache, *self._detection
        )

    @property
    def _storage(self) -> str:
        return self._home.storage(self._options.storage)

    @property
    def _detection(self) -> tuple[str, str]:
        return ("--detection-seconds", f"{self._options.detection_seconds:g}")

    def _address(self, name: str) -> str:
        return self._namespaces.part(name).address if self._namespaces else ADDRESS

    def _prefix(self, name: str) -> tuple[str, ...]:
        return self._namespaces.enter(name) if self._namespaces else ()

    def _spec(self, name: str, module: str, role: str, *arguments: str) -> ServiceSpec:
        health = self._home.health(name)
        return ServiceSpec(
            name=name,
            module=module,
            arguments=(
                *("--credentials", str(self.bus.credentials(role))),
                *("--health-host", self._address(name), "--health-port", "0", "--health-file", str(health)),
                *arguments,
            ),
            log=self._home.log(name),
            health=health,
            prefix=self._prefix(name),
        )


def outward_address(toward: str = "192.0.2.1") -> str:
    """Return the address of this machine on the route to another one; loopback if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((toward, 9))
        except OSError:
            return ADDRESS
        return str(probe.getsockname()[0])
