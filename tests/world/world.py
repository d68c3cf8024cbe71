"""One world: a bus, a registry, schedulers, hosts and users, all of it run from one plan."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import torch

from resile_learner import devices
from resile_learner.agent.host_devices import TorchDevices
from resile_learner.messages import WorkerConfig
from resile_shared.bus.subjects import ALLOCATIONS, JOBS, POLICY, POOL, TENANTS
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobEvent

from .checks import Checks
from .faults import Faults
from .knowledge import LASTING_SECONDS, Knowledge
from .loop import Clock, SimLoop, Stuck, current_process
from .nats import Network, SimClient
from .packages import SimEnvironments
from .patches import SimPath, replaced, surroundings
from .plan import Action, Plan
from .server import Message, SimServer, Stored
from .services import Host, Service, forgetting, registry, scheduler
from .training import Begun, Commit, SimScript
from .users import Users
from .worker import SimCluster, SimForkServer, SimWorker, current_worker

PATIENCE_SECONDS = 600.0
"""Virtual time that a calm world gets to complete its jobs: most take less than two minutes."""
STALL_SECONDS = 2500.0
"""As much more for each job whose script hangs, until that is noticed, a few times."""
SYNC_SECONDS = 2.0
REPORTS_PREFIX = "resile.report."
LOOK_SECONDS = 0.1
COMPARE_SECONDS = 1.0
OFFER_SECONDS = 5.0
END_SECONDS = 20.0
"""After the last job has ended: until then its last events are published, and its workers are gone and forgotten."""
QUIET_SECONDS = 5.0
"""A world in which all jobs have ended is looked at for so long: faults and actions that come later meet nothing."""


class World:
    """The world of one plan. ``story`` is what happened, in words, with the time of each item."""

    def __init__(self, plan: Plan, *, detection_seconds: float = 3.0) -> None:
        self.plan = plan
        self.loop = SimLoop()
        self.rng = random.Random(f"{plan.seed} delays")
        self.names = random.Random(f"{plan.seed} names")
        self.story: list[tuple[float, str]] = []
        self.checks = Checks({f"host-{number}": labels for number, labels in enumerate(plan.labels, start=1)})
        self.server = SimServer(self.loop)
        self.server.on_store.append(self._on_store)
        self.network = Network(self.loop, self.server, self.rng)
        self.network.on_deliver.append(self._on_deliver)
        self.detection_seconds = detection_seconds
        self.hosts: dict[str, Host] = {}
        self.workers = SimCluster(self.loop, random.Random(f"{plan.seed} workers"), script_of=_script_of)
        self.workers.kinds = {f"host-{number}": kind for number, kind in enumerate(plan.kinds, start=1)}
        self.workers.on_begin = self._on_begun
        self.workers.on_commit = self._on_commit
        self.workers.on_complete = lambda: self.faults.pull("completion", current_process())
        self.workers.on_start = self._on_worker_started
        self.workers.on_end = self._on_worker_ended
        self.workers.objects.on_write.append(self._on_write)
        self.workers.objects.on_read.append(self._on_read)
        self.workers.objects.on_delete.append(self._on_delete)
        self.faults = Faults(self)
        self.knowledge = Knowledge(self)
        self.calm_at = plan.calm_at
        """When the faults cease: as planned, or earlier if there is nothing left that they could meet."""
        self._is_calm = self._is_over = self._is_settled = False
        self._ended_at = float("inf")
        """Since when all jobs have ended."""
        with self._surroundings():
            self.registry = registry(self.loop, detection_seconds=detection_seconds)
            if plan.removes:
                self.registry.settings = forgetting(self.registry.settings, self.rng.randrange(9))
            self.schedulers = [
                scheduler(self.loop, number, policy=plan.policy) for number in range(plan.num_schedulers)
            ]
            for service in self.schedulers if plan.keeps_policy else ():
                service.settings = service.settings.model_copy(update={"policy": None})
            for number, num_slots in enumerate(plan.slots, start=1):
                name = f"host-{number}"
                clock, labels = Clock(self.rng.uniform(-2, 2)), self.checks.labels.get(name, "")
                self.hosts[name] = Host(self.loop, name, num_slots=num_slots, labels=labels, clock=clock)
            self.users = Users(
                self.loop,
                plan,
                on_suspended=self._restart_services,
                change_settings=self._change_settings,
                upload=lambda package: self.workers.objects.upload(f"storage/{package}", b"a package"),
                on_changed=self.checks.sharing.answered,
            )

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
        errors = (error for service in self.services for error in service.errors)
        for what in [*errors, *self.loop.errors, *self.users.refused]:
            self.checks.break_promise(what)
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
            self.loop.call_at(action.at, self._act, action)
        self.loop.call_at(self.plan.calm_at, self._become_calm)
        self._sync()

    def _act(self, action: Action) -> None:
        if action.trigger:
            self.faults.wait_for(action.trigger, lambda _: self.users.act(action))
        else:
            self.users.act(action)

    def _on_store(self, stored: Stored) -> None:
        calm_for = self.loop.now - self.calm_at
        event = self.checks.on_store(stored, self.workers.objects.objects, calm_for=calm_for)
        if event is not None:
            self._tell_of(event)
        if stored.subject.startswith(ALLOCATIONS.prefix):
            self.faults.pull("allocation", current_process())
        elif stored.subject.startswith(REPORTS_PREFIX):
            self.faults.pull("report", current_process())
        if stored.subject.startswith((ALLOCATIONS.prefix, JOBS.prefix)):
            self.faults.pull("write", current_process())
        if stored.subject.startswith((POLICY.prefix, TENANTS.prefix)):
            self.faults.pull("sharing", current_process())
        elif stored.subject.startswith(POOL.prefix):
            self.faults.pull("settings", current_process())
        elif stored.subject.startswith(JOBS.prefix) and "KV-Operation" in stored.headers:
            self.faults.pull("removal", current_process())

    def _on_write(self, key: str, content: bytes) -> None:
        worker = current_worker()
        training = worker.training if worker else None
        start = training.lineage.start if training else 0
        self.checks.on_write(key, content, self.workers.objects.objects, start=start)
        if "/part-" in key:
            self.faults.pull("pause" if training and training.is_paused else "checkpoint", current_process())
        elif "/models/" in key:
            self.faults.pull("model", current_process())

    def _on_read(self, key: str) -> None:
        checkpoint, is_part, number = key.partition("/part-")
        if is_part and f"{checkpoint}/part-{int(number) + 1:05d}" not in self.workers.objects.objects:
            self.faults.pull("load", current_process())

    def _on_delete(self, key: str) -> None:
        self.checks.on_delete(key, self.workers.objects.objects)

    def _tell_of(self, event: JobEvent) -> None:
        item = event.item
        slots = f" on {', '.join(item.slots)}" if item.slots else ""
        self.tell(f"{event.job} {item.kind}: generation {item.generation}{slots}, at {item.iteration}. {item.reason}")

    def _on_deliver(self, host: str, message: Message) -> None:
        if host in self.hosts and message.subject.startswith(ALLOCATIONS.prefix):
            job = message.subject.removeprefix(ALLOCATIONS.prefix)
            if job not in self.users.unstored:  # it was assigned before the bus refused to store it
                self.checks.allocation_sent(host, job)

    def _on_begun(self, begun: Begun) -> None:
        self.checks.begun(begun)
        self.tell(f"{begun.job}: worker {begun.worker} begins generation {begun.generation} at {begun.iteration}")

    def _on_commit(self, commit: Commit) -> None:
        self.checks.committed(commit)
        if commit.is_last:
            self.faults.pull("last iteration", current_process())

    def _on_worker_started(self, worker: SimWorker) -> None:
        self.checks.worker_started(worker.config.job, worker.config.worker, worker.process.host)
        self.faults.pull("worker starts", worker.process)
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
        if self._is_calm:
            return
        self._is_calm, self.calm_at = True, self.loop.now
        self.tell("CALM")
        self.faults.cease()
        self.users.begin_calm()
        self._offer_hosts()
        self._compare()

    def _offer_hosts(self) -> None:
        """Undrain drained hosts, and start the agents of those again that have left."""
        for name in sorted(self.users.drained):
            match self.knowledge.state_of(name):
                case HostState.DRAINING:
                    self.users.undrain(name)
                case HostState.LEFT:
                    self.hosts[name].crash()
        self.loop.call_later(OFFER_SECONDS, self._offer_hosts)

    @property
    def stalling_jobs(self) -> set[str]:
        """The jobs whose scripts hang."""
        submissions = self.plan.jobs
        return {job for number, job in self.users.jobs.items() if submissions[number].script.hangs_at is not None}

    def _restart_services(self) -> None:
        """End all of a pool but the bus, or in a calm world its schedulers, which give no slots any more."""
        self.tell("RESTART of the pool")
        for service in self.schedulers if self._is_calm else self.services:
            service.crash()

    def _change_settings(self, number: int) -> None:
        """Start the pool's services again with other settings, as an operator does."""
        self.registry.change(forgetting(self.registry.settings, number))
        for service in self.schedulers:
            service.crash()

    def _compare(self) -> None:
        for difference in self.knowledge.look():
            self.checks.break_promise(f"since {LASTING_SECONDS:g} seconds {difference}")
        self.loop.call_later(COMPARE_SECONDS, self._compare)

    def _run(self) -> None:
        self._look()
        num_stalling = sum(submission.script.hangs_at is not None for submission in self.plan.jobs)
        # A start may wait for a checkpoint that was whole when one of its members read it.
        num_stalling += any(fault.kind == "damaged storage" for fault in self.plan.faults)
        patience = PATIENCE_SECONDS + num_stalling * STALL_SECONDS
        if not self.loop.run_until(lambda: self._is_over, limit=self.plan.calm_at + patience):
            for what in filter(None, map(self._what_it_waits_for, range(len(self.plan.jobs)))):
                self.checks.break_promise(what)
            if not self.checks.broken:
                self.checks.break_promise("the users do not know that their jobs have ended")
        if self.checks.is_livelocked:
            return
        scripts = {number: submission.script for number, submission in enumerate(self.plan.jobs)}
        self.loop.run_until(lambda: self._is_settled, limit=self.loop.now + END_SECONDS)
        missing = {self.users.jobs[number] for number, each in enumerate(self.plan.jobs) if each.is_missing}
        self.checks.check_missing(missing)
        gangs = {self.users.jobs[number]: each for number, each in enumerate(self.plan.jobs) if each.gang}
        lost = {job for job, each in gangs.items() if not each.restartable}
        excused = self.users.stopped | self.users.unstored | missing | lost | self._beyond_limits()
        kinds = {0, *self.plan.kinds}
        elastic = {n: job for n, job in self.users.jobs.items() if job not in gangs and job not in self.users.deleted}
        self.checks.check_end(self.users.jobs, scripts, excused)
        self.checks.sharing.check_end(self.knowledge.sharing())
        self.checks.check_results(elastic, scripts, self.workers.objects.objects, kinds=kinds)
        self.checks.check_removed(self.workers.objects.objects)
        self.checks.check_packages(self.workers.objects.objects, self.users.unstored)
        self.checks.check_gangs({job: self.workers.finished_in_gang(job) for job in gangs})
        for what in self.knowledge.remaining():
            self.checks.break_promise(f"{what}, {END_SECONDS:g} seconds after the last job has ended")

    def _look(self) -> None:
        self._is_over = (self._is_calm and self.users.are_satisfied) or self.checks.is_livelocked
        self._ended_at = min(self._ended_at, self.loop.now) if self._have_jobs_ended() else float("inf")
        if self.loop.now - self._ended_at >= QUIET_SECONDS:
            if self.loop.now > max((action.at for action in self.plan.actions), default=0.0):
                self._become_calm()
            self._is_settled = self.checks.is_published() and not any(self.knowledge.remaining())
        self.loop.call_later(LOOK_SECONDS, self._look)

    def _have_jobs_ended(self) -> bool:
        jobs = self.users.jobs
        return len(jobs) == len(self.plan.jobs) and self.checks.have_ended(jobs.values(), self.users.deleted)

    def _beyond_limits(self) -> set[str]:
        """The jobs whose least number of workers a worker may have been unable to follow, for lack of open files."""
        limits = [1 + fault.number % 3 for fault in self.plan.faults if fault.kind == "limit files"]
        most = min(limits, default=None)
        return {
            job
            for number, job in self.users.jobs.items()
            if most is not None and self.plan.jobs[number].min_workers > most
        }

    def _what_it_waits_for(self, number: int) -> str:
        job = self.users.jobs.get(number)
        record = self.checks.records.get(job or "")
        if record is None:
            return f"submission {number} was never answered"
        if record.state.is_final:
            return ""
        return f"{job} is still {record.state} at iteration {record.iteration}: {record.reason}"

    # what takes the place of the product's own, for `surroundings`

    def client(self) -> SimClient:
        return SimClient(self.network)

    @property
    def fork_servers(self) -> "_ForkServers":
        return _ForkServers(self)

    def environments(self, folder: SimPath) -> SimEnvironments:
        return SimEnvironments(self, folder)

    async def devices(self, fork_server: object) -> TorchDevices:
        """What torch says of a host: a probe step on hosts of different kinds gives different bits."""
        kind = self.workers.kinds.get(self.this_host().host, 0)
        with replaced((devices, "probe_digest", lambda device: f"{kind:012d}"), (devices, "_processor", lambda: "cpu")):
            return TorchDevices(cpu_class=devices.device_class(torch.device("cpu")))

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
