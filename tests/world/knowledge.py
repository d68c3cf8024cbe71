"""What the leader believes, compared with what is so: once the world is calm, the two agree before long.

A difference that lasts is a slot that is lost for ever, a worker that nobody ends, or a host that is never used, though
every job may complete in spite of it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from resile_learner.agent.core import AgentCore
from resile_scheduler.core.core import Scheduler
from resile_scheduler.core.state.worker import Phase
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import Intent
from resile_shared.messages.pool import PolicyRecord, TenantsRecord

from .loop import Process, current_process

if TYPE_CHECKING:
    from .world import World

LASTING_SECONDS = 45.0
"""Longer than any loss takes to be detected and mended, a save for a pause included."""


class Knowledge:
    """The cores of one world, and the differences that were seen when it was calm, with the time of the first look."""

    def __init__(self, world: "World") -> None:
        self.differences: dict[str, float] = {}
        self._world = world
        self._schedulers: list[tuple[Process, Scheduler]] = []
        self._agents: dict[str, tuple[Process, AgentCore]] = {}

    def scheduler(self, **settings: object) -> Scheduler:
        """Make the core of a scheduler that is the current process."""
        core = Scheduler(**settings)  # type: ignore[arg-type]
        self._schedulers.append((_here(), core))
        return core

    def agent(self, host: str, incarnation: int, **settings: bool) -> AgentCore:
        """Make the core of an agent that is the current process."""
        core = AgentCore(host, incarnation, **settings)
        self._agents[host] = _here(), core
        return core

    def look(self) -> list[str]:
        """Compare; return the differences that have lasted too long, once each."""
        now = self._world.loop.now
        found = set(self._differences())
        self.differences = {what: since for what, since in self.differences.items() if what in found}
        for what in sorted(found):
            self.differences.setdefault(what, now)
        lasting = [what for what, since in self.differences.items() if now - since >= LASTING_SECONDS]
        self.differences.update(dict.fromkeys(lasting, float("inf")))
        return lasting

    def state_of(self, host: str) -> HostState | None:
        """Return the state of ``host`` as the leader knows it; None if there is no leader, or it does not know it."""
        leader = self._leader()
        known = leader._pool.hosts.get(host) if leader else None
        return known.record.state if known else None

    def sharing(self) -> tuple[PolicyRecord, TenantsRecord] | None:
        """Return the policy and the tenants by which the leader decides; None if nobody leads."""
        leader = self._leader()
        return (leader._policy_choice._record, leader._tenant_shares._record) if leader else None

    def remaining(self) -> list[str]:
        """Return what should be gone some time after the end of all jobs."""
        alive = [f"{worker.process.name} is alive" for worker in self._world.workers.living.values()]
        listed = [
            f"the agent of {host} still lists worker {worker} of {job}"
            for host, (_, agent) in self._agents.items()
            for job, worker in agent.workers
        ]
        leader = self._leader()
        held = [f"{slot.name} is held by {holder}" for slot, holder in leader._pool.holders.items()] if leader else []
        return [*alive, *listed, *held]

    def _leader(self) -> Scheduler | None:
        living = [core for process, core in self._schedulers if not process.is_dead]
        return max(living, key=lambda core: core.epoch, default=None)

    def _differences(self) -> Iterator[str]:
        leader = self._leader()
        if leader is None:
            yield "nobody leads"
            return
        pool = leader._pool
        living = {(w.config.job, w.config.worker): w.process for w in self._world.workers.living.values()}
        held = set(pool.holders.values())
        for key, process in living.items():
            if key not in held:
                yield f"{process.name} runs, and the scheduler does not know of it"
        for slot, (job, number) in pool.holders.items():
            if (job, number) not in living and pool.jobs[job].workers[number].phase is not Phase.GONE:
                yield f"the scheduler waits for worker {number} of {job} on {slot.name}, which does not run"
        for name, service in self._world.hosts.items():
            host = pool.hosts.get(name)
            if not service.process.is_dead and not (host and host.is_usable and host.is_heard):
                yield f"{name} is up, and the scheduler does not use it"
        for job in pool.jobs.values():
            if not job.is_over and job.intent is not Intent.TRAIN and job.id not in self._world.stalling_jobs:
                yield f"{job.id} is still {job.intent}"


def _here() -> Process:
    process = current_process()
    assert process is not None
    return process
