"""Worlds keep the promises: a few of fixed seeds, whatever else is tried; `make world` tries fresh ones."""

import pytest

from .campaign import live, tell
from .drawing import draw
from .plan import Plan, broke_once

PLANS = (*map(draw, range(10)), *broke_once())


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.seed}")
def test_a_world_keeps_the_promises(plan: Plan) -> None:
    world, broken = live(plan)
    assert not broken, tell(world.plan)


def test_a_seed_reproduces_a_world() -> None:
    stories = [live(draw(7))[0].story for _ in range(2)]
    assert stories[0] == stories[1]
    assert live(draw(8))[0].story != stories[0]
