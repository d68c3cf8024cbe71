"""Worlds keep the promises: a few of fixed seeds, whatever else is tried; `make world` tries fresh ones."""

import pytest

from .campaign import live, tell
from .plan import draw

BROKE_ONCE = (13, 45, 78, 147, 262, 342, 400, 536, 672, 723, 769, 589431836)
"""Seeds of worlds that broke a promise at some time."""


@pytest.mark.parametrize("seed", [*range(10), *BROKE_ONCE])
def test_a_world_keeps_the_promises(seed: int) -> None:
    world, broken = live(draw(seed))
    assert not broken, tell(world.plan)


def test_a_seed_reproduces_a_world() -> None:
    stories = [live(draw(7))[0].story for _ in range(2)]
    assert stories[0] == stories[1]
    assert live(draw(8))[0].story != stories[0]
