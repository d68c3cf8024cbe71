"""Carries out the faults of a plan, and takes them all back when the world becomes calm."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .loop import Process
from .plan import Fault

if TYPE_CHECKING:
    from .world import World


class Faults:
    """The faults of one world. ``counts`` says how many of each kind had a target, and so an effect."""

    def __init__(self, world: "World") -> None:
        self.counts: dict[str, int] = {}
        self._world = world
        self._is_calm = False
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
            "freeze host": lambda f: self._freeze(
                [self._host(f).process, *world.workers.processes(self._host(f).host)], f
            ),
            "restart bus": lambda f: self._restart_bus(f, loses=False),
            "lose unsynced": lambda f: self._restart_bus(f, loses=True),
            "cut bus": lambda f: self._cut_bus(f, "up", "down"),
            "cut bus upwards": lambda f: self._cut_bus(f, "up"),
            "cut bus downwards": lambda f: self._cut_bus(f, "down"),
            "slow bus": self._slow_bus,
            "step clock": self._step_clock,
        }

    def begin(self, fault: Fault) -> None:
        """Let ``fault`` happen now."""
        if self._is_calm:
            return
        action = self._actions.get(fault.kind)
        has_effect = action(fault) if action else self._world.workers.begin_fault(fault)
        if has_effect:
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
            self._world.tell(f"FAULT {fault}")

    def cease(self) -> None:
        """Take back all that lasts."""
        self._is_calm = True
        world = self._world
        if not world.server.is_up:
            world.server.start()
        for host in list({name for name, _ in world.network.cut}):
            world.network.heal_host(host)
        world.network.slow.clear()
        for process in [*(service.process for service in world.services), *world.workers.processes()]:
            process.thaw()
        for service in world.services:
            service.restart()
        world.workers.heal()

    def _scheduler(self, fault: Fault) -> Process:
        return self._world.schedulers[fault.target % len(self._world.schedulers)].process

    def _host(self, fault: Fault) -> Any:
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
        workers = self._world.workers.processes()
        return workers[fault.target % len(workers)] if workers else None

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
        host = self._place(fault)
        self._world.network.cut_host(host, *directions)
        self._later(fault.seconds, self._world.network.heal_host, host)
        return True

    def _place(self, fault: Fault) -> str:
        """Any machine that is connected to the bus."""
        places = sorted({service.host for service in self._world.services})
        return places[fault.target % len(places)]

    def _slow_bus(self, fault: Fault) -> bool:
        host = self._place(fault)
        self._world.network.slow[host] = 0.5
        self._later(fault.seconds, self._world.network.slow.pop, host, None)
        return True

    def _step_clock(self, fault: Fault) -> bool:
        places = self._world.services
        clock = places[fault.target % len(places)].clock
        clock.offset += (-3600.0, -5.0, 5.0, 3600.0)[fault.number % 4]
        return True

    def _later(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        self._world.loop.call_later(seconds, call, *args)
