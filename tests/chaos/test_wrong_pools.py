"""Every pool that is wrong on purpose is condemned by the verdict, from what a campaign against it would record.

`make chaos-wrong` makes a real campaign against each.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resile.chaos.attacks import Attack, AttackKind, Target, TargetKind
from resile.chaos.members import Saved
from resile.chaos.observation import Observations
from resile.chaos.recovery_watch import InjectedAttack, PartRecovery
from resile.chaos.verdict import CampaignRecord, Outcome, faults, oversubscribed
from resile.pool.worker_processes import RunningWorker

from .test_members import FIRST, restarted, trained
from .test_members import faults as member_faults
from .test_verdict import HISTORY, LOG, ONCE, RECOVERED, SHA, completed, events
from .wrong.wrong_pools import WRONG, _replace

HERE = Path(__file__).with_name("wrong")


def of_job(**changes: object) -> list[str]:
    job = completed(**changes)  # type: ignore[arg-type]
    return of_record(jobs=[job], seen=Observations(events=events(job)))


def of_record(**changes: object) -> list[str]:
    job = completed()
    fields = {"accepted": ["job-1"], "jobs": [job], "seen": Observations(events=events(job)), "outcomes": [RECOVERED]}
    return list(faults(CampaignRecord(**{**fields, "undisturbed_sha256": SHA, **changes})))  # type: ignore[arg-type]


def of_request(kind: AttackKind) -> list[str]:
    injected = InjectedAttack(Attack(kind, Target(TargetKind.JOB, "job-1")), 1.0, 1.0)
    return of_record(outcomes=[Outcome(1, injected, [PartRecovery(f"{kind} job-1", None)])])


def of_two_models() -> list[str]:
    return member_faults([*FIRST, *trained(2, range(10, 12), workers=(0,), start=111.0, params="another")], 0, 9)


def of_a_double_slot() -> list[str]:
    again = LOG.splitlines()[1].replace("job-1", "job-2")
    return of_record(agent_logs={"host-1": f"{LOG}{again}\n"})


def of_live_workers() -> list[str]:
    here = [RunningWorker("job-1", 1, "host-1", 71), RunningWorker("job-2", 4, "host-1", 72)]
    return of_record(oversubscribed=tuple(oversubscribed(here, {"host-1": 1})))


OBSERVED: dict[str, Callable[[], list[str]]] = {
    "ledger counts twice": lambda: of_job(ledger=(ONCE.model_copy(update={"once": 90, "more": 6}),)),
    "stored model is another": lambda: of_record(models={"job-1": "b" * 64}),
    "completion names another model": lambda: of_job(params_sha256="0" * 64),
    "bits depend on the number of workers": of_two_models,
    "an event is not published": lambda: of_job(history=(HISTORY[0], HISTORY[2])),
    "an event is published twice": lambda: of_job(history=(HISTORY[0], HISTORY[1], *HISTORY[1:])),
    "a pause is forgotten": lambda: of_request(AttackKind.PAUSE),
    "a priority is ignored": lambda: of_request(AttackKind.PRIORITY),
    "a submission is forgotten": lambda: of_record(jobs=[]),
    "a slot is given twice": of_a_double_slot,
    "workers that are dropped live on": of_live_workers,
    "a checkpoint lacks a part": lambda: of_record(torn={("job-1", 40)}),
    "checkpoints are ignored": lambda: member_faults(
        [*FIRST, *trained(2, range(1, 12), workers=(2,), start=120.0)],
        checkpoints=[Saved(109.0, 8)],
        items=restarted(0, 0, last=11),
    ),
}


def test_there_is_an_observation_of_every_wrong_pool() -> None:
    assert OBSERVED.keys() == WRONG.keys()
    assert len(WRONG) >= 10


@pytest.mark.parametrize("name", OBSERVED)
def test_a_wrong_pool_is_condemned(name: str) -> None:
    assert any(re.search(WRONG[name].fault, fault) for fault in OBSERVED[name]())


def test_every_patch_still_finds_what_it_replaces() -> None:
    code = (
        "import importlib, wrong_pools\n"
        "for wrong in wrong_pools.WRONG.values():\n"
        "    for module in wrong.modules: wrong.patch(importlib.import_module(module))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(HERE)})


def test_a_process_of_a_wrong_pool_is_patched_as_it_imports() -> None:
    code = "from resile_scheduler.core.job_commands import JobCommands as J; print(J._change_priority.__name__)"
    patched = {"PYTHONPATH": str(HERE), "WRONG_POOL": "a priority is ignored"}
    names = [
        subprocess.check_output([sys.executable, "-P", "-c", code], text=True, env=env).strip() for env in ({}, patched)
    ]
    assert names == ["_change_priority", "ignore"]


class Commands:
    """Something that a patch replaces a method of."""

    def submit(self, event: str, *, now: float) -> str:
        return event


def with_a_parameter_less(self: Commands, event: str) -> str:
    return event


def with_another_kind_of_parameter(self: Commands, event: str, now: float) -> str:
    return event


def with_another_result(self: Commands, event: str, *, now: float) -> int:
    return 0


@pytest.mark.parametrize(
    "replacement",
    [with_a_parameter_less, with_another_kind_of_parameter, with_another_result],
    ids=lambda f: f.__name__,
)
def test_a_patch_of_something_that_has_another_signature_by_now_is_refused(replacement: Callable[..., object]) -> None:
    with pytest.raises(AssertionError, match="adapt the patch"):
        _replace(Commands, submit=replacement)
