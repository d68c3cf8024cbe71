"""Which attacks there are, and in which order a campaign makes them."""

from collections import Counter
from itertools import islice

import pytest

from resile.chaos.attack_plan import MAX_CONCURRENT, PlannedAttack, planned_attacks
from resile.chaos.attacks import MENU, AttackKind, Target, TargetKind, check, parse
from resile_shared.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "what", "why"),
    [
        (AttackKind.PARTITION, TargetKind.WORKER, "links belong to hosts"),
        (AttackKind.SLOW_LINK, TargetKind.OBJECT_STORE, "has no link"),
        (AttackKind.CORRUPT, TargetKind.HOST, "only the object-store"),
        (AttackKind.DISK_FULL, TargetKind.MONITOR, "only the disks"),
        (AttackKind.TERMINATE, TargetKind.BUS, "ends at SIGTERM, as it should"),
    ],
)
def test_an_attack_that_makes_no_sense_is_refused_with_the_reason(kind: AttackKind, what: TargetKind, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check(kind, what)


@pytest.mark.parametrize(
    ("what", "name", "why"),
    [
        (TargetKind.BUS, "nats", "there is only one bus"),
        (TargetKind.WORKER, "", "needs the name of a job"),
        (TargetKind.HOST, "", "needs the name of a host"),
        (TargetKind.WORKER, "job-1/last", "give the job and the number"),
    ],
)
def test_a_target_that_cannot_be_is_refused_with_the_reason(what: TargetKind, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(what, name)


def test_a_worker_may_be_named_by_its_job_alone() -> None:
    assert parse(TargetKind.WORKER, "job-1") == Target(TargetKind.WORKER, "job-1")
    assert parse(TargetKind.WORKER, "job-1/3").job == "job-1"


def plan(seed: int, num: int) -> list[PlannedAttack]:
    return list(islice(planned_attacks(seed, MENU), num))


def test_the_same_seed_deals_the_same_attacks_and_another_one_others() -> None:
    assert plan(3, 100) == plan(3, 100)
    assert plan(3, 100) != plan(4, 100)


def test_every_attack_is_made_once_before_any_is_made_again() -> None:
    dealt = [(planned.kind, planned.what) for planned in plan(1, 2 * len(MENU))]
    assert Counter(dealt[: len(MENU)]) == Counter(MENU) == Counter(dealt[len(MENU) :])


def test_some_attacks_overlap_but_never_too_many() -> None:
    at_once = most = 0
    for planned in plan(2, 500):
        at_once = 1 if planned.waits else at_once + 1
        most = max(most, at_once)
    assert most == MAX_CONCURRENT
