"""One world: a bus, a registry, schedulers, hosts and users, all of it run from one plan."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from resile_learner.agent.devices import TorchDevices
from resile_learner.messages import WorkerConfig
from resile_shared.messages.jobs import JobEvent
from resile_shared.subjects import ALLOCATIONS

from .checks import Checks
from .faults import Faults
from .loop import Clock, SimLoop, Stuck, current_process
from .nats import Network, SimClient
from .patches import surroundings
from .plan import Plan
from .server import Message, SimServer, Stored
from .services import Host, Service, registry, scheduler
from .training import Commit, SimScript
from .users import Users
from .worker import SimCluster, SimForkServer, SimWorker

PATIENCE_SECONDS = 3000.0
"""Virtual time that a calm world gets to complete its jobs: longer than all deadlines, one after the other."""
SYNC_SECONDS = 2.0
LOOK_SECONDS = 0.1


class World:
    """The world of one plan. ``story`` is what happened, in words, with the time of each item."""

    def __init__(self, plan: Plan, *, detection_seconds: float = 3.0) -> None:
        self.plan = plan
        self.loop = SimLoop()
        self.rng = random.Random(f"{plan.seed} delays")
        self.names = random.Random(f"{plan.seed} names")
        self.story: list[tuple[float, str]] = []
        self.checks = Checks()
        self.server = SimServer(self.loop)
        self.server.on_store.append(self._on_store)
        self.network = Network(self.loop, self.server, self.rng)
        self.network.on_deliver.append(self._on_deliver)
        self.detection_seconds = detection_seconds
        self.hosts: dict[str, Host] = {}
        self.workers = SimCluster(self.loop, random.Random(f"{plan.seed} workers"), script_of=_script_of)
        self.workers.on_commit = self._on_commit
        self.workers.on_start = self._on_worker_started
        self.workers.on_end = self._on_worker_ended
        self.faults = Faults(self)
        with self._surroundings():
            self.registry = registry(self.loop, detection_seconds=detection_seconds)
            self.schedulers = [
                scheduler(self.loop, number, policy=plan.policy) for number in range(plan.num_schedulers)
            ]
            for number, num_slots in enumerate(plan.slots, start=1):
                name = f"host-{number}"
                clock = Clock(self.rng.uniform(-2, 2))
                self.hosts[name] = Host(self.loop, name, num_slots=num_slots, clock=clock)
            self.users = Users(self.loop, plan)

    @property
    def services(self) -> list[Service]:
        return [self.registry, *self.schedulers, *self.hosts.values()]

    def live(self) -> list[str]:
        """Run the plan, then the calm until all jobs have ended; return the promises that were broken."""
        with self._surroundings():
            self._schedule()
            try:
                self._run()
            except Stuck:
                self.checks.break_promise("nothing happens any more")
        for error in [*(error for service in self.services for error in service.errors), *self.loop.errors]:
            self.checks.break_promise(error)
        return self.checks.broken

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with surroundings(self), self.workers.surroundings():
            yield

    def tell(self, what: str) -> None:
        """Add to the story."""
        self.story.append((self.loop.now, what))

    def _schedule(self) -> None:
        for fault in self.plan.faults:
            self.loop.call_at(fault.at, self.faults.begin, fault)
        for action in self.plan.actions:
            self.loop.call_at(action.at, self.users.act, action)
        self.loop.call_at(self.plan.calm_at, self._become_calm)
        self._sync()

    def _on_store(self, stored: Stored) -> None:
        event = self.checks.on_store(stored, self.workers.objects.objects)
        if event is not None:
            self._tell_of(event)

    def _tell_of(self, event: JobEvent) -> None:
        item = event.item
        slots = f" on {', '.join(item.slots)}" if item.slots else ""
        self.tell(f"{event.job} {item.kind}: generation {item.generation}{slots}, at {item.iteration}. {item.reason}")

    def _on_deliver(self, host: str, message: Message) -> None:
        if host in self.hosts and message.subject.startswith(ALLOCATIONS.prefix):
            self.checks.allocation_sent(host, message.subject.removeprefix(ALLOCATIONS.prefix))

    def _on_commit(self, commit: Commit) -> None:
        self.checks.committed(commit)

    def _on_worker_started(self, worker: SimWorker) -> None:
        self.checks.worker_started(worker.config.job, worker.config.worker, worker.process.host)
        self.tell(f"{worker.process.name} starts")

    def _on_worker_ended(self, worker: SimWorker) -> None:
        self.checks.worker_ended(worker.config.job, worker.config.worker)
        self.tell(f"{worker.process.name} ends with status {worker.status}")

    def _sync(self) -> None:
        """The bus writes to its disk from time to time."""
        if self.server.is_up:
            self.server.sync()
        self.loop.call_later(SYNC_SECONDS, self._sync)

    def _become_calm(self) -> None:
        self.tell("CALM")
        self.faults.cease()
        for name in self.users.drained:
            self.hosts[name].crash()  # an agent that starts again offers its host again
        self.users.begin_calm()

    def _run(self) -> None:
        self._look()
        if not self.loop.run_until(lambda: self._is_over, limit=self.plan.calm_at + PATIENCE_SECONDS):
            for number in range(len(self.plan.jobs)):
                self.checks.break_promise(self._what_it_waits_for(number))
        scripts = {number: submission.script for number, submission in enumerate(self.plan.jobs)}
        self.loop.run_until(lambda: False, limit=self.loop.now + 5.0)  # the last events are published
        self.checks.check_end(self.users.jobs, scripts, self.users.stopped, self.workers.objects.objects)

    def _look(self) -> None:
        self._is_over = self.loop.now > self.plan.calm_at and self.users.are_satisfied
        self.loop.call_later(LOOK_SECONDS, self._look)

    def _what_it_waits_for(self, number: int) -> str:
        job = self.users.jobs.get(number)
        record = self.checks.records.get(job or "")
        if record is None:
            return f"submission {number} was never answered"
        if record.state.is_final:
            return f"{job} is {record.state}"
        return f"{job} is still {record.state} at iteration {record.iteration}: {record.reason}"

    # what takes the place of the product's own, for `surroundings`

    def client(self) -> SimClient:
        return SimClient(self.network)

    @property
    def fork_servers(self) -> "_ForkServers":
        return _ForkServers(self)

    async def devices(self, environment: object) -> TorchDevices:
        return TorchDevices()

    def this_host(self) -> Host:
        """The host on which the current process runs."""
        process = current_process()
        assert process is not None
        return self.hosts[process.host]


class _ForkServers:
    """In place of the class `ForkServerClient`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self, *, log: object, settings: object = None) -> Any:
        host = self._world.this_host()
        return SimForkServer(self._world.workers, host.host, is_host_lost=lambda: not host.is_wanted)


def _script_of(config: WorkerConfig) -> SimScript:
    return SimScript(**orjson.loads(config.args[0]))
