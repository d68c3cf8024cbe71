"""A pause has its effect whatever happens to the members meanwhile: whoever is paused says so until it is ended."""

from collections.abc import Callable

import pytest

from resile_learner.messages import CheckpointSaved, Joined, Pause

from .test_worker import SCRIPT, Scene


class PausedScene(Scene):
    """Workers 0 and 1, which were asked to pause while the storage takes nothing."""

    def __init__(self) -> None:
        super().__init__(1, SCRIPT)
        self.start(0, 1)
        self.order(0, 1)
        self.run(self.has_trained(3))
        self.cluster.objects.failing = 1.0
        for process in self.processes.values():
            process.send(Pause(lineage=1))
        self.pass_time(5.0)

    def pass_time(self, seconds: float) -> None:
        until = self.loop.now + seconds
        self.run(lambda: self.loop.now >= until, seconds=seconds + 1.0)

    def reports(self, generation: int) -> list[CheckpointSaved]:
        saved = [message for message in self.messages if isinstance(message, CheckpointSaved) and message.pausing]
        return [message for message in saved if message.generation == generation]

    def repair_storage(self) -> None:
        self.cluster.objects.failing = 0.0

    def is_reported(self, generation: int) -> Callable[[], bool]:
        return lambda: len(self.reports(generation)) >= 3


@pytest.fixture
def scene() -> PausedScene:
    return PausedScene()


def check_paused_once(scene: PausedScene) -> None:
    """All that was reported is one checkpoint of the iteration at which training stopped."""
    stopped_at = 1 + max(commit.iteration for commit in scene.commits)
    saved = [message for message in scene.messages if isinstance(message, CheckpointSaved) and message.pausing]
    assert {(message.lineage, message.iteration) for message in saved} == {(1, stopped_at)}


def test_a_pause_is_reported_again_and_again(scene: PausedScene) -> None:
    assert not scene.reports(1)
    scene.repair_storage()
    scene.run(scene.is_reported(1))
    check_paused_once(scene)


def test_a_pause_survives_the_loss_of_a_member(scene: PausedScene) -> None:
    scene.processes[0].kill()
    scene.run(lambda: 0 in scene.exits)
    scene.order(1, is_recovery=True)
    scene.run(scene.is_active(2))
    scene.repair_storage()
    scene.run(scene.is_reported(2))
    check_paused_once(scene)


def test_a_pause_survives_all_members_that_had_stopped_training(scene: PausedScene) -> None:
    scene.start(2)
    scene.order(2)
    scene.run(lambda: {0, 1} <= scene.exits.keys())
    scene.repair_storage()
    scene.run(scene.is_reported(2))
    check_paused_once(scene)


def test_a_pause_survives_the_loss_of_all_members_that_had_a_snapshot(scene: PausedScene) -> None:
    scene.start(2)
    scene.order(0, 1, 2)
    scene.run(lambda: any(isinstance(message, Joined) and message.worker == 2 for message in scene.messages))
    for worker in (0, 1):
        scene.processes[worker].kill()
    scene.run(lambda: {0, 1} <= scene.exits.keys())
    scene.order(2, is_recovery=True)
    scene.run(scene.is_active(3))
    scene.repair_storage()
    scene.run(scene.is_reported(3))
    check_paused_once(scene)


def test_a_pause_that_was_stored_before_the_members_changed_is_reported_by_those_that_came_after(
    scene: PausedScene,
) -> None:
    scene.repair_storage()
    scene.run(scene.is_reported(1))
    scene.start(2)
    scene.order(2)
    scene.run(scene.is_reported(2))
    check_paused_once(scene)
