"""Membership and recovery as one state machine: each step of a world is chosen, and can be left out, on its own."""

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .membership_world import World
from .test_recovery import check_end

ANY = st.integers(0, 1 << 16)


class Lives(RuleBasedStateMachine):
    """Messages come late and twice, workers die, generations are ordered, and the scheduler learns of it by and by."""

    world: World

    @initialize(seed=st.integers(0, 1 << 32), num_workers=st.integers(1, 4))
    def begin(self, seed: int, num_workers: int) -> None:
        choices = random.Random(seed)
        self.world = World(lambda: choices.random() < 0.5)
        self.next_worker = num_workers
        self.world.order(tuple(range(num_workers)), tuple(range(num_workers)))

    @precondition(lambda self: self.world.in_flight)
    @rule(which=ANY, times=st.integers(1, 6))
    def messages_arrive(self, which: int, times: int) -> None:
        for _ in range(min(times, len(self.world.in_flight))):
            self.world.deliver(which, again=False)

    @precondition(lambda self: self.world.in_flight)
    @rule(which=ANY)
    def a_message_arrives_and_will_again(self, which: int) -> None:
        self.world.deliver(which, again=True)

    @rule(which=ANY)
    def a_worker_goes_on(self, which: int) -> None:
        workers = sorted(self.world.nodes)
        self.world.step(workers[which % len(workers)])

    @rule()
    def all_workers_go_on(self) -> None:
        for worker in sorted(self.world.nodes):
            self.world.step(worker)

    @precondition(lambda self: len(self.world.orders) < 8 and not self.world.is_recovering and self.world.members())
    @rule(leaving=st.sets(st.integers(0, 8)), joining=st.integers(0, 3), told=st.sets(st.integers(0, 12)))
    def a_generation_is_ordered(self, leaving: set[int], joining: int, told: set[int]) -> None:
        kept = tuple(worker for rank, worker in enumerate(self.world.orders[-1].workers) if rank not in leaving)
        joining = max(joining, not kept)
        new = tuple(range(self.next_worker, self.next_worker + joining))
        self.next_worker += joining
        self.world.order(kept + new, tuple(told & self.world.nodes.keys()))

    @precondition(lambda self: self.world.active and self.world.living())
    @rule(which=ANY)
    def a_worker_is_killed(self, which: int) -> None:
        living = self.world.living()
        self.world.kill(living[which % len(living)])

    @precondition(lambda self: len(self.world.orders) < 12 and self.world.active and self.has_losses())
    @rule(told=st.sets(st.integers(0, 12)))
    def a_recovery_is_ordered(self, told: set[int]) -> None:
        self.world.recover(tuple(told & self.world.nodes.keys()))

    @precondition(lambda self: self.world.active)
    @rule(which=ANY)
    def the_scheduler_learns(self, which: int) -> None:
        active = sorted(self.world.active)
        self.world.believed = max(self.world.believed, active[which % len(active)])

    def has_losses(self) -> bool:
        return any(node.gone == "killed" for node in self.world.nodes.values())

    def teardown(self) -> None:
        """In the end the scheduler learns all: those who are left go on from what was committed."""
        world = getattr(self, "world", None)
        if world is None or not world.active or not world.members():
            return
        world.believed = max(world.nodes[worker].generation for worker in world.members())
        if world.recover(tuple(world.nodes)):
            world.settle()
            check_end(world)


Lives.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestLives = Lives.TestCase
