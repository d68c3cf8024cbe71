"""A member that is lost when training is complete: nothing hangs, and the job has completed."""

from typing import Any

from .conftest import TRAIN

DIES_AFTER_THE_RESULT = """
import os, signal, time
from resile_learner.training.reports import Reports

complete = Reports.complete

def complete_and_die(self, *args, **kwargs):
    result = complete(self, *args, **kwargs)
    if self._session.view.rank == 0:
        time.sleep(0.5)  # the report is on its way by then
        os.kill(os.getpid(), signal.SIGKILL)
    return result

Reports.complete = complete_and_die
"""


def test_the_members_that_wait_for_one_that_died_after_the_result_are_ended(resile: Any, undisturbed: str) -> None:
    script = resile.script(DIES_AFTER_THE_RESULT + TRAIN)
    ended = resile.run("run", script, "-w", "3", "--json", "-o", "model.safetensors")
    assert ended.status == 0, ended.err
    assert ended.json["state"] == "completed"
    assert ended.json["params_sha256"] == undisturbed
    assert (resile.folder / "model.safetensors").exists()
