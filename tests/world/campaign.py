"""Runs many worlds, each from a seed of its own; prints figures, and the story of a world that broke a promise."""

import gc
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .drawing import draw
from .plan import Plan
from .world import World


@dataclass
class Totals:
    """What was lived through."""

    num_worlds: int = 0
    num_jobs: int = 0
    num_steps: int = 0
    num_messages: int = 0
    num_committed: int = 0
    hours: float = 0.0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, world: World, broken: list[str]) -> None:
        self.num_worlds += 1
        self.num_jobs += len(world.users.jobs)
        self.num_steps += world.loop.num_steps
        self.num_messages += world.server.num_messages
        self.num_committed += world.checks.num_committed
        self.hours += world.loop.now / 3600
        self.faults.update(world.faults.counts)
        self.states.update(world.checks.states)
        if broken:
            self.failed[world.plan.seed] = broken

    def __str__(self) -> str:
        lines = [
            f"{self.num_worlds} worlds, {self.num_jobs} job lives in {self.seconds:.0f} s "
            f"({60 * self.num_jobs / max(self.seconds, 0.001):.0f} a minute)",
            f"{self.hours:.1f} simulated hours, {self.num_steps:,} steps, {self.num_messages:,} messages, "
            f"{self.num_committed:,} rounds committed by members",
            "faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items())),
            "states: " + ", ".join(f"{state} {count}" for state, count in sorted(self.states.items())),
        ]
        return "\n".join(lines)


def live(plan: Plan) -> tuple[World, list[str]]:
    """Run the world of ``plan``; return it with the promises that were broken."""
    sys.unraisablehook = lambda _: None  # crashed processes are left as they were, and Python complains of that
    was_disabled = logging.root.manager.disable  # to change it takes longer than to start a service
    if was_disabled < logging.CRITICAL:
        logging.disable()
    logging.getLogger("opentelemetry.context").disabled = True  # also when what crashed is collected
    warnings.simplefilter("ignore", RuntimeWarning)
    world = World(plan)
    gc.disable()  # else what crashed processes left behind is finalized in the middle of others
    try:
        return world, world.live()
    finally:
        gc.enable()
        if was_disabled < logging.CRITICAL:
            logging.disable(was_disabled)  # tests that follow in this process may read logs


def run(seeds: Iterable[int], *, seconds: float) -> Totals:
    """Run one world after the other until ``seconds`` are over."""
    totals = Totals()
    logging.disable()
    gc.freeze()  # modules are no garbage: without them it is found much faster
    begun = time.monotonic()
    for seed in seeds:
        world, broken = live(draw(seed))
        totals.add(world, broken)
        totals.seconds = time.monotonic() - begun
        if broken:
            print(f"seed {seed}: {broken[0]}", flush=True)
        if totals.seconds >= seconds:
            break
        if totals.num_worlds % 20 == 0:
            gc.collect()
    return totals


def shortest(plan: Plan) -> Plan:
    """Return the plan with the shortest prefix of faults that still breaks a promise, without those it does not need.

    Deterministic, since every world is.
    """
    for num_faults in range(len(plan.faults) + 1):
        if live(plan.first(num_faults))[1]:
            plan = plan.first(num_faults)
            break
    return plan.reduced(lambda smaller: bool(live(smaller)[1]))


def tell(plan: Plan) -> str:
    """Return the story of the world of ``plan``, for people."""
    world, broken = live(plan)
    lines = [f"seed {plan.seed}: hosts with {plan.slots} slots, {plan.num_schedulers} schedulers, {plan.policy}"]
    lines += [f"  labels of hosts: {'; '.join(plan.labels)}"] if plan.labels else []
    lines += [f"  submits {submission}" for submission in plan.jobs]
    lines += [f"{at:9.3f}  {what}" for at, what in world.story]
    verdict = ["BROKEN:", *(f"  {what}" for what in broken)] if broken else ["no promise broken"]
    return "\n".join([*lines, *verdict])
