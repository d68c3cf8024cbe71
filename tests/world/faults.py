"""Carries out the faults of a plan, and takes them all back when the world becomes calm."""

from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any

from resile_shared.bus.subjects import JOBS

from . import storage
from .loop import Process
from .plan import Fault
from .sockets import KINDS

if TYPE_CHECKING:
    from .world import World


LINK_SECONDS = 0.0005


class Faults:
    """The faults of one world. ``counts`` says how many of each kind had a target, and so an effect."""

    def __init__(self, world: "World") -> None:
        self.counts: dict[str, int] = {}
        self._world = world
        self._is_calm = False
        self._waiting: list[tuple[str, Callable[[Process | None], object]]] = []
        """The faults and actions that wait, each with its trigger."""
        self._actor: Process | None = None
        """The process that has just done what a fault waited for."""
        self._damaged: set[str] = set()
        """The checkpoints that are damaged."""
        self._actions: dict[str, Callable[[Fault], bool]] = {
            "crash scheduler": lambda f: self._crash(self._scheduler(f), f),
            "crash registry": lambda f: self._crash(world.registry.process, f),
            "crash agent": lambda f: self._crash(self._host(f).process, f),
            "crash host": self._crash_host,
            "kill worker": self._kill_worker,
            "freeze scheduler": lambda f: self._freeze([self._scheduler(f)], f),
            "freeze registry": lambda f: self._freeze([world.registry.process], f),
            "freeze agent": lambda f: self._freeze([self._host(f).process], f),
            "freeze worker": self._freeze_worker,
            "freeze host": lambda f: self._freeze([self._host(f).process, *self._workers(self._host(f).host)], f),
            "restart bus": lambda f: self._restart_bus(f, loses=False),
            "lose unsynced": lambda f: self._restart_bus(f, loses=True),
            "cut bus": lambda f: self._cut_bus(f, "up", "down"),
            "cut bus upwards": lambda f: self._cut_bus(f, "up"),
            "cut bus downwards": lambda f: self._cut_bus(f, "down"),
            "slow bus": self._slow_bus,
            "overload bus": self._overload_bus,
            "cut host": self._cut_host,
            "cut pair": lambda f: self._cut_pair(f, both=True),
            "cut pair one way": lambda f: self._cut_pair(f, both=False),
            "cut data links": lambda f: self._cut_pair(f, both=True, kinds=("data",)),
            "cut control links": lambda f: self._cut_pair(f, both=True, kinds=("control",)),
            "reset links": self._reset_links,
            "reset data links": lambda f: self._reset_links(f, kinds=("data",)),
            "slow links": self._slow_links,
            "cut storage": self._cut_storage,
            "storage fails": lambda f: self._spoil_storage(f, failing=0.5),
            "slow storage": lambda f: self._spoil_storage(f, seconds=1.0),
            "ambiguous storage": lambda f: self._spoil_storage(f, ambiguous=0.5),
            "stale storage": lambda f: self._spoil_storage(f, stale=0.5),
            "full storage": lambda f: self._spoil_storage(f, is_full=True),
            "damaged storage": self._damage_storage,
            "hidden storage": self._hide_storage,
            "limit files": self._limit_files,
            "step clock": self._step_clock,
            "lose messages": self._lose_messages,
            "refuse job": self._refuse_job,
        }

    def begin(self, fault: Fault) -> None:
        """Let ``fault`` happen now, or at its next trigger."""
        if fault.trigger:
            self.wait_for(fault.trigger, partial(self._begin, fault))
        else:
            self._begin(fault, None)

    def wait_for(self, trigger: str, call: Callable[[Process | None], object]) -> None:
        """Let ``call`` wait for ``trigger``; it gets the process that does that."""
        self._waiting.append((trigger, call))

    def pull(self, trigger: str, actor: Process | None) -> None:
        """Let the oldest that waits for ``trigger`` begin with the next step: ``actor`` has just done that."""
        waiting = next((waiting for waiting in self._waiting if waiting[0] == trigger), None)
        if waiting is not None:
            self._waiting.remove(waiting)
            self._world.loop.call_soon(waiting[1], actor, context=Context())

    def _begin(self, fault: Fault, actor: Process | None) -> None:
        if self._is_calm:
            return
        self._actor = actor
        if self._actions[fault.kind](fault):
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
            self._world.tell(f"FAULT {fault}")
        self._actor = None

    def cease(self) -> None:
        """Take back all that lasts."""
        self._is_calm = True
        self._waiting.clear()
        world = self._world
        if not world.server.is_up:
            world.server.start()
        world.server.seconds = None
        world.server.copies, world.server.refused, world.server.full = None, frozenset(), frozenset()
        for host in list({name for name, _ in world.network.cut}):
            world.network.heal_host(host)
        world.network.slow.clear()
        for process in [*(service.process for service in world.services), *self._workers()]:
            process.thaw()
        for service in world.services:
            service.restart()
        network, objects = world.workers.network, world.workers.objects
        network.lost_hosts.clear()
        network.heal()
        world.workers.delay_seconds = LINK_SECONDS
        objects.cut_hosts.clear()
        objects.failing = objects.ambiguous = objects.stale = 0.0
        objects.seconds, objects.is_full = storage.SECONDS, False
        objects.show()
        world.workers.most_members.clear()

    def _scheduler(self, fault: Fault) -> Process:
        processes = [service.process for service in self._world.schedulers]
        if self._actor in processes:
            return self._actor
        return processes[fault.target % len(processes)]

    def _host(self, fault: Fault) -> Any:
        if self._actor is not None and self._actor.host in self._world.hosts:
            return self._world.hosts[self._actor.host]
        hosts = list(self._world.hosts.values())
        return hosts[fault.target % len(hosts)]

    def _crash(self, process: Process, fault: Fault) -> bool:
        if process.is_dead:
            return False
        process.crash_after(fault.number)
        return True

    def _crash_host(self, fault: Fault) -> bool:
        """Power fails: its agent and its workers end, and come back later."""
        host = self._host(fault)
        if not host.is_wanted:
            return False
        host.stop()
        self._later(fault.seconds, host.restart)
        return True

    def _kill_worker(self, fault: Fault) -> bool:
        worker = self._worker(fault)
        return worker is not None and self._crash(worker, fault)

    def _freeze_worker(self, fault: Fault) -> bool:
        worker = self._worker(fault)
        return worker is not None and self._freeze([worker], fault)

    def _worker(self, fault: Fault) -> Process | None:
        workers = self._workers()
        if self._actor in workers:
            return self._actor
        return workers[fault.target % len(workers)] if workers else None

    def _limit_files(self, fault: Fault) -> bool:
        """A worker may open no more files than one to three workers need: it refuses to train with more."""
        worker = self._worker(fault)
        if worker is not None:
            self._world.workers.most_members[worker] = 1 + fault.number % 3
        return worker is not None

    def _freeze(self, processes: list[Process], fault: Fault) -> bool:
        for process in processes:
            process.freeze()
            self._later(fault.seconds, process.thaw)
        return bool(processes)

    def _restart_bus(self, fault: Fault, *, loses: bool) -> bool:
        server = self._world.server
        if not server.is_up:
            return False
        server.stop(loses_unsynced=loses)
        self._later(fault.seconds, server.start)
        return True

    def _cut_bus(self, fault: Fault, *directions: str) -> bool:
        return self._cut_bus_of(self._place(fault), fault, *directions)

    def _cut_bus_of(self, host: str, fault: Fault, *directions: str) -> bool:
        self._world.network.cut_host(host, *directions)
        self._later(fault.seconds, self._world.network.heal_host, host)
        return True

    def _place(self, fault: Fault) -> str:
        """Any machine that is connected to the bus."""
        places = sorted({service.host for service in self._world.services})
        if self._actor is not None and self._actor.host in places:
            return self._actor.host
        return places[fault.target % len(places)]

    def _cut_host(self, fault: Fault) -> bool:
        """Nothing reaches a host any more, nor leaves it."""
        host = self._host(fault).host
        lost = self._world.workers.network.lost_hosts
        lost.add(host)
        self._world.workers.objects.cut_hosts.add(host)
        self._later(fault.seconds, self._end_cut_host, host)
        return self._cut_bus_of(host, fault, "up", "down")

    def _end_cut_host(self, host: str) -> None:
        workers = self._world.workers
        workers.network.lost_hosts.discard(host)
        workers.objects.cut_hosts.discard(host)
        workers.network.heal()

    def _cut_pair(self, fault: Fault, *, both: bool, kinds: tuple[str, ...] = KINDS) -> bool:
        """Two hosts do not reach each other. Cuts of pairs end together, with the first of them."""
        hosts = list(self._world.hosts)
        one, other = hosts[fault.target % len(hosts)], hosts[(fault.target + 1 + fault.number) % len(hosts)]
        if one == other:
            return False
        network = self._world.workers.network
        network.cut(one, other, kinds)
        if both:
            network.cut(other, one, kinds)
        self._later(fault.seconds, network.heal)
        return True

    def _reset_links(self, fault: Fault, *, kinds: tuple[str, ...] = KINDS) -> bool:
        hosts = list(self._world.hosts)
        one, other = hosts[fault.target % len(hosts)], hosts[(fault.target + fault.number) % len(hosts)]
        self._world.workers.network.reset_between(one, other, kinds)
        return True

    def _slow_links(self, fault: Fault) -> bool:
        workers = self._world.workers
        workers.delay_seconds = 0.05
        self._later(fault.seconds, setattr, workers, "delay_seconds", LINK_SECONDS)
        return True

    def _cut_storage(self, fault: Fault) -> bool:
        host = self._host(fault).host
        objects = self._world.workers.objects
        objects.cut_hosts.add(host)
        self._later(fault.seconds, objects.cut_hosts.discard, host)
        return True

    def _spoil_storage(self, fault: Fault, **values: object) -> bool:
        objects = self._world.workers.objects
        for name, value in values.items():
            self._later(fault.seconds, setattr, objects, name, getattr(objects, name))
            setattr(objects, name, value)
        return True

    def _damage_storage(self, fault: Fault) -> bool:
        """Damage a part of a checkpoint, the newest of a job that loads it, unless no other one of the job is whole."""
        objects = self._world.workers.objects
        whole = {k.rpartition("/")[0] for k in objects.objects if k.endswith("/manifest.json")} - self._damaged
        parts = sorted(key for key in objects.objects if "/part-" in key and key.rpartition("/")[0] in whole)
        if self._actor in self._workers():
            folder = f"storage/jobs/{self._actor.worker.config.job}/"  # type: ignore[union-attr]
            newest = max((one for one in whole if one.startswith(folder)), default="")
            parts = [key for key in parts if key.startswith(f"{newest}/")]
        if not parts:
            return False
        key = parts[fault.target % len(parts)]
        checkpoint, job = key.rpartition("/")[0], key.partition("/checkpoints/")[0]
        if not any(other.startswith(f"{job}/") for other in whole - {checkpoint}):
            return False
        self._damaged.add(checkpoint)
        objects.damage(key)
        self._world.checks.has_damage = True
        return True

    def _hide_storage(self, fault: Fault) -> bool:
        """The checkpoints of all jobs are gone for a while, and so is every worker."""
        objects = self._world.workers.objects
        if not any(key.endswith("/manifest.json") for key in objects.objects):
            return False
        objects.hide()
        self._later(fault.seconds, objects.show)
        for worker in self._workers():
            worker.crash_after(0)
        return True

    def _workers(self, host: str | None = None) -> list[Process]:
        living = self._world.workers.living.values()
        return [worker.process for worker in living if host in (None, worker.process.host)]

    def _slow_bus(self, fault: Fault) -> bool:
        host = self._place(fault)
        self._world.network.slow[host] = 0.5
        self._later(fault.seconds, self._world.network.slow.pop, host, None)
        return True

    def _overload_bus(self, fault: Fault) -> bool:
        """What is stored is acknowledged late for a while."""
        server, rng = self._world.server, self._world.rng
        server.seconds = lambda: rng.uniform(0.2, 1.2)
        self._later(fault.seconds, setattr, server, "seconds", None)
        return True

    def _step_clock(self, fault: Fault) -> bool:
        places = self._world.services
        clock = places[fault.target % len(places)].clock
        clock.offset += (-3600.0, -5.0, 5.0, 3600.0)[fault.number % 4]
        return True

    def _lose_messages(self, fault: Fault) -> bool:
        """Of those that are not stored some are lost, some arrive late, and some twice."""
        server, rng = self._world.server, self._world.rng

        def copies() -> tuple[float, ...]:
            return rng.choice(((), (0.0,), (0.0,), (rng.uniform(0.0, 3.0),), (0.0, rng.uniform(0.0, 10.0))))

        server.copies = copies
        self._later(fault.seconds, setattr, server, "copies", None)
        return True

    def _refuse_job(self, fault: Fault) -> bool:
        """The bus does not store the record of a job, for its arguments are too large; or nothing of it for a while."""
        jobs = sorted(self._world.users.jobs.values())
        if not jobs:
            return False
        job = jobs[fault.target % len(jobs)]
        self._world.users.unstored.add(job)
        server = self._world.server
        refused = "refused" if fault.number % 2 == 0 else "full"
        setattr(server, refused, getattr(server, refused) | {JOBS.subject(job)})
        self._later(fault.seconds, setattr, server, refused, frozenset())
        return True

    def _later(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Call what ends a fault, unless all have ceased by then."""
        self._world.loop.call_later(seconds, lambda: None if self._is_calm else call(*args))
