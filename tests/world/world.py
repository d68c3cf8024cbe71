"""One world: a bus, a registry, schedulers, hosts and users, all of it run from one seed."""

import random
from collections.abc import Callable
from typing import Any, Protocol

from .loop import Clock, SimLoop, current_process
from .nats import Network, SimClient
from .patches import surroundings
from .server import SimServer
from .services import Host, Service, registry, scheduler


class StartsForkServers(Protocol):
    """Makes the fork server of a host, which has the interface of `ForkServerClient`."""

    def __call__(self, world: "World", host: Host) -> Any:
        """Return the fork server for an agent that starts now."""


class World:
    """A pool of ``slots`` (per host), with ``num_schedulers`` that contend for the lease."""

    def __init__(
        self,
        seed: int,
        *,
        fork_server: StartsForkServers,
        slots: tuple[int, ...] = (2, 2),
        num_schedulers: int = 1,
        detection_seconds: float = 3.0,
    ) -> None:
        self.seed = seed
        self.loop = SimLoop()
        self.rng = random.Random(f"{seed} delays")
        self.names = random.Random(f"{seed} names")
        self.server = SimServer(self.loop)
        self.network = Network(self.loop, self.server, self.rng)
        self.detection_seconds = detection_seconds
        self.hosts: dict[str, Host] = {}
        self.services: list[Service] = []
        self.schedulers: list[Service] = []
        self._fork_server = fork_server
        with surroundings(self):
            self.services.append(registry(self.loop, detection_seconds=detection_seconds))
            self.schedulers = [scheduler(self.loop, number) for number in range(num_schedulers)]
            self.services += self.schedulers
            for number, num_slots in enumerate(slots, start=1):
                self.add_host(f"host-{number}", num_slots)

    def add_host(self, name: str, num_slots: int) -> Host:
        """Add a host, whose clock is wrong by up to two seconds."""
        host = Host(self.loop, name, num_slots=num_slots, clock=Clock(self.rng.uniform(-2, 2)))
        self.hosts[name] = host
        self.services.append(host)
        return host

    def run(self, done: Callable[[], bool], *, seconds: float) -> bool:
        """Run until ``done()``, for ``seconds`` of virtual time at the most; return whether it is done."""
        with surroundings(self):
            return self.loop.run_until(done, limit=self.loop.now + seconds)

    @property
    def errors(self) -> list[str]:
        """What went wrong in a way that no fault explains."""
        return [*(error for service in self.services for error in service.errors), *self.loop.errors]

    # what takes the place of the product's own, for `surroundings`

    def client(self) -> SimClient:
        return SimClient(self.network)

    @property
    def fork_servers(self) -> "_ForkServers":
        return _ForkServers(self)

    async def devices(self, *, slots: int | None, slots_per_gpu: int) -> Any:
        process = current_process()
        assert process is not None
        return self.hosts[process.host].devices

    def new_fork_server(self) -> Any:
        process = current_process()
        assert process is not None
        return self._fork_server(self, self.hosts[process.host])


class _ForkServers:
    """In place of the class `ForkServerClient`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self, *, log: object, settings: object = None) -> Any:
        return self._world.new_fork_server()
