"""What the training call finds in a worker: its configuration, and the generation that it is going to join."""

from pathlib import Path
from typing import Any, NoReturn

import pytest

from resile_learner.collectives.poller import LinkPoller
from resile_learner.messages import CodeCopy, WorkerConfig
from resile_learner.session import View
from resile_learner.worker.worker_session import WorkerSession
from resile_testing.waiting import block_until

from .test_control_thread import Scene, scene

__all__ = ["scene"]


def leave() -> NoReturn:
    raise AssertionError


def session_of(scene: Scene, **fields: Any) -> WorkerSession:
    config = WorkerConfig(job="j", worker=0, script="s", directory="/", storage="file:///none", **fields)
    return WorkerSession(config, scene.control, LinkPoller(), leave=leave)


def test_before_it_joins_a_worker_is_no_member(scene: Scene) -> None:
    session = session_of(scene)
    assert session.num_workers == 0
    assert session.expected is None
    assert not session.completed


@pytest.mark.parametrize("is_cold_start", [False, True])
def test_a_joiner_knows_the_generation_that_it_will_join(scene: Scene, is_cold_start: bool) -> None:
    """And so the batch that its shards have; an initial member begins with what its script has made."""
    session = session_of(scene)
    scene.send(scene.order(2).model_copy(update={"is_recovery": False, "cold_start": is_cold_start}))
    block_until(lambda: scene.control.view.first_order)
    assert session.expected == (None if is_cold_start else View(2, (0, 1), 0))


def test_a_run_that_was_resumed_with_changed_code_says_so(scene: Scene, tmp_path: Path) -> None:
    code = CodeCopy(folder="/", copied_to=str(tmp_path), changed=("train.py",))
    assert session_of(scene, code=code).caveats == ["changed train.py"]
    assert session_of(scene).caveats == []


def test_the_workers_of_a_job_on_one_host_share_the_outcomes_of_probes_where_there_is_a_place(
    scene: Scene, tmp_path: Path
) -> None:
    folders = [session_of(scene, shared_folder=str(tmp_path)).known_probes for _ in range(2)]
    assert folders == [tmp_path / "probes" / "j"] * 2
    assert folders[0] is not None
    assert folders[0].is_dir()
    assert session_of(scene).known_probes is None
    (tmp_path / "file").touch()
    assert session_of(scene, shared_folder=str(tmp_path / "file")).known_probes is None
