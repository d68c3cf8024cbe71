"""An attack is found in the changes that it caused, and in no others."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from resile.chaos.attacks import Attack, AttackKind, Target, TargetKind
from resile.chaos.causes import is_effect, report_effects
from resile.chaos.observation import Observations
from resile.chaos.recovery_watch import InjectedAttack
from resile.client import AsyncClient
from resile_shared.http.api import ChangeKind, ChangeView, NewAttack, TraceSpan, TraceView
from resile_shared.messages.jobs import HistoryItem, JobEvent
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


@dataclass
class Pool:
    """A pool whose job has recovered from the attack, as its monitor shows it."""

    attacks: list[NewAttack] = field(default_factory=list)

    async def changes(self, job: str) -> list[ChangeView]:
        return [change()]

    async def trace(self, trace: str) -> TraceView:
        return TraceView(id=trace, spans=(step("worker suspected", worker=1, suspect=3),), dropped=0)

    async def add_attack(self, trace: str, attack: NewAttack) -> None:
        self.attacks.append(attack)


def allocation() -> JobEvent:
    item = HistoryItem(number=4, time=at(10.2), kind="allocation", generation=2, workers=3, slots=(), iteration=7)
    return JobEvent(job="job-1", name="digits", tenant="default", state="running", priority=5000, item=item)


async def test_an_attack_whose_history_item_comes_after_the_recovery_is_in_its_trace() -> None:
    pool, seen = Pool(), Observations()

    async def publish_late() -> None:
        await asyncio.sleep(0.3)
        seen.events.append(allocation())

    late = asyncio.create_task(publish_late())
    assert await report_effects(cast("AsyncClient", pool), KILL, seen) == {"job-1": "1" * 32}
    assert [attack.attack for attack in pool.attacks] == ["kill worker job-1/3"]
    await late


async def test_an_attack_that_changed_nothing_is_in_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resile.chaos.causes.EVENT_SECONDS", 0.3)
    pool = Pool()
    assert await report_effects(cast("AsyncClient", pool), KILL, Observations()) == {}
    assert not pool.attacks
