"""In which order minimums are served: waiting counts, but it does not upset what a job has had for longer."""

from dataclasses import replace
from math import inf

from resile_scheduler.policies.demand import Demand
from resile_scheduler.policies.ranked import fairshare
from resile_scheduler.policies.ranking import PATIENCE_SECONDS, in_turn

from .test_policies import demand, workers


def holding(number: int, seconds: float, *, least: int = 1, rank: int = 5000) -> Demand:
    return replace(demand(number, least=least, rank=rank), holds_slots=True, assigned_workers=4, holding_since=-seconds)


def waiting(number: int, seconds: float, *, least: int = 1, rank: int = 5000) -> Demand:
    due_since = PATIENCE_SECONDS - seconds
    return replace(demand(number, least=least, rank=rank), due_since=due_since if due_since <= 0 else inf)


def ranked(*jobs: Demand) -> list[int]:
    return [job.number for job in sorted(jobs, key=in_turn(jobs))]


def test_jobs_that_hold_slots_come_first_and_then_the_highest_priority() -> None:
    assert ranked(waiting(1, 0), waiting(2, 9, rank=9000), holding(3, 5), holding(4, 1, rank=9000)) == [4, 3, 2, 1]


def test_of_equals_the_one_that_has_attained_least_comes_first() -> None:
    suspended = replace(waiting(1, 100), attained=50.0)
    assert ranked(suspended, waiting(2, 1)) == [2, 1]


def test_a_job_that_is_due_comes_before_what_got_slots_since_and_before_all_that_wait() -> None:
    first, second = PATIENCE_SECONDS + 100, PATIENCE_SECONDS + 50
    jobs = (waiting(1, second, rank=1), waiting(2, first, rank=1), waiting(3, 0, rank=9000))
    assert ranked(*jobs, holding(4, 101), holding(5, 99), holding(6, 49)) == [4, 2, 5, 1, 6, 3]


def test_a_large_minimum_gets_its_slots_as_soon_as_those_who_were_there_before_leave_enough() -> None:
    due = waiting(9, PATIENCE_SECONDS + 100, least=6, rank=1)
    old, new = holding(1, 1000, least=4), holding(2, 10, least=1)
    assert workers(fairshare([old, new, due], 8)) == [4, 4, 0], "it is passed meanwhile: no slot is idle"
    assert workers(fairshare([new, due], 8)) == [2, 6]
    assert workers(fairshare([replace(new, least=3), due], 8)) == [0, 8], "what started after it was due is suspended"
    assert workers(fairshare([replace(new, least=3), waiting(9, 10, least=6)], 8)) == [8, 0]
