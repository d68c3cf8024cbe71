"""Which attacks there are, and in which order a campaign makes them."""

from collections import Counter
from itertools import islice

import pytest

from resile.chaos.attacks import Kind, Target, What, check, parse, refusal
from resile.chaos.plan import MOST_AT_ONCE, Card, deal
from resile_shared.errors import UsageError

MENU = [(kind, what) for kind in Kind for what in What if not refusal(kind, what)]


@pytest.mark.parametrize(
    ("kind", "what", "why"),
    [
        (Kind.PARTITION, What.WORKER, "the network belongs to the host"),
        (Kind.SLOW_LINK, What.OBJECT_STORE, "has no link"),
        (Kind.CORRUPT, What.HOST, "only the object-store"),
        (Kind.DISK_FULL, What.BUS, "only the object-store"),
    ],
)
def test_an_attack_that_makes_no_sense_is_refused_with_the_reason(kind: Kind, what: What, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check(kind, what)


@pytest.mark.parametrize(
    ("what", "name", "why"),
    [
        (What.BUS, "nats", "there is one bus"),
        (What.WORKER, "", "name the job"),
        (What.HOST, "", "name the host"),
        (What.WORKER, "job-1/last", "write the job and the number"),
    ],
)
def test_a_target_that_cannot_be_is_refused_with_the_reason(what: What, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(what, name)


def test_a_worker_may_be_named_by_its_job_alone() -> None:
    assert parse(What.WORKER, "job-1") == Target(What.WORKER, "job-1")
    assert parse(What.WORKER, "job-1/3").job == "job-1"


def cards(seed: int, num: int) -> list[Card]:
    return list(islice(deal(seed, MENU), num))


def test_the_same_seed_deals_the_same_attacks_and_another_one_others() -> None:
    assert cards(3, 100) == cards(3, 100)
    assert cards(3, 100) != cards(4, 100)


def test_every_attack_is_made_once_before_any_is_made_again() -> None:
    dealt = [(card.kind, card.what) for card in cards(1, 2 * len(MENU))]
    assert Counter(dealt[: len(MENU)]) == Counter(MENU) == Counter(dealt[len(MENU) :])


def test_some_attacks_overlap_but_never_too_many() -> None:
    at_once = most = 0
    for card in cards(2, 500):
        at_once = 1 if card.waits else at_once + 1
        most = max(most, at_once)
    assert most == MOST_AT_ONCE
