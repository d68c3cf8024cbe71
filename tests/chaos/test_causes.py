"""An attack is found in the changes that it caused, and in no others."""

import pytest

from resile.chaos.attacks import Attack, AttackKind, Target, TargetKind
from resile.chaos.causes import is_effect
from resile.chaos.recovery import InjectedAttack
from resile_shared.api import ChangeKind, ChangeView, TraceSpan
from resile_shared.messages.message import at

KILL = InjectedAttack(
    Attack(AttackKind.KILL, Target(TargetKind.WORKER, "job-1/3")), 10.0, 10.0, workers={"job-1": frozenset({3})}
)


def change(kind: ChangeKind = "recovery", *, time: float = 10.2) -> ChangeView:
    return ChangeView(
        number=4,
        items=(4,),
        kind=kind,
        time=at(time),
        seconds=0.1,
        generation=2,
        iteration=7,
        workers_before=4,
        workers=3,
        reason="",
        summary="",
        trace="1" * 32,
        has_spans=True,
    )


def step(name: str, **attributes: int | str) -> TraceSpan:
    found = {f"resile.{key}": value for key, value in {"job": "job-1", **attributes}.items()}
    return TraceSpan(
        id="1" * 16,
        parent=None,
        name=name,
        service="learner",
        begin=10.1,
        seconds=0.1,
        attributes=found,
        events=(),
        links=(),
        error=None,
    )


@pytest.mark.parametrize(
    "spans",
    [
        [step("worker suspected", worker=1, suspect=3)],
        [step("worker is gone", worker=3), step("iteration", worker=1)],
        [step("recover", worker=1, suspect=3)],
        [step("decide upon Tick")],
    ],
)
def test_the_recovery_from_the_loss_of_a_victim_is_an_effect(spans: list[TraceSpan]) -> None:
    assert is_effect(change(), spans, KILL, job="job-1")


def test_what_another_cause_has_is_no_effect() -> None:
    lost = [step("worker suspected", worker=1, suspect=3)]
    assert not is_effect(change(), [step("worker suspected", worker=1, suspect=2)], KILL, job="job-1")
    assert not is_effect(change("resize"), lost, KILL, job="job-1")
    assert not is_effect(change(time=9.0), lost, KILL, job="job-1")
    assert not is_effect(change(), [step("decide upon Tick")], KILL, job="job-2")
