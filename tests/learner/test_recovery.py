"""Recovery after losses, however messages and deaths fall together, without threads, sockets or clocks."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from .membership_world import Fate, World

ACTIONS = ["deliver"] * 6 + ["again"] + ["step"] * 8 + ["heartbeat", "order", "kill", "recover", "recover", "learn"]


def live(seed: int) -> World:
    """Let a world live, and have its scheduler learn all in the end."""
    choices = random.Random(seed)
    fate = Fate(choices, ACTIONS)
    world = fate.world
    for _ in range(choices.randint(20, 400)):
        fate.happen()
    if not world.active or not world.members():
        return world
    world.believed = max(world.nodes[worker].generation for worker in world.members())
    while world.recover(()):
        newest = world.orders[-1]
        world.tell([choices.choice(newest.workers)])  # the agents of all others are cut off
        world.settle()
        world.tell(set(world.living()) - world.reachable_from(newest.workers))  # and back in the end
        world.settle()
        if not any(world.nodes[worker].gone == "left" for worker in newest.workers):
            check_end(world)
            break
    return world


def check_end(world: World) -> None:
    newest = world.orders[-1]
    for worker, node in world.nodes.items():
        if worker not in newest.workers:
            assert node.gone, f"worker {worker}, which was dropped, waits for ever"
    living = [world.nodes[worker] for worker in newest.workers if not world.nodes[worker].gone]
    stateless = [world.nodes[worker] for worker in newest.workers if world.nodes[worker].gone == "without any state"]
    assert len(living) in (0, len(newest.workers)), "members agree on whether there is a state"
    assert len(living) + len(stateless) == len(newest.workers)
    for node in living:
        assert node.view.current == newest, "somebody waits for ever"
        assert node.history is not None
        begun = world.recovered[newest.generation]
        assert node.history[: len(begun)] == begun
        assert len(node.history) > len(begun), "training goes on"
        assert list(node.history) == sorted(node.history), "generations only rise"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_members_die_at_any_moment_and_those_who_are_left_go_on_from_what_was_committed(seed: int) -> None:
    live(seed)
