"""A change that a member cannot follow is withdrawn: the job goes on as it was."""

from resile_scheduler.core.events import Tick
from resile_scheduler.core.state.backoff import GROWTH_SECONDS
from resile_shared.messages.jobs import JobState
from resile_shared.messages.reports import GrowthRefused

from .test_core import Bench, gone, numbers, worker

HOSTS = ("host-2", "host-3", "host-4")
TEXT = "worker 0 on 10.0.0.1 cannot train with 4 workers"


def growing(bench: Bench) -> int:
    """A job of one worker, and its growth to four; return the generation of that."""
    bench.submit()
    bench.activate()
    for host in HOSTS:
        bench.host(host, 1)
    assert numbers(bench) == [0, 1, 2, 3]
    return bench.newest().generation


def leave(bench: Bench) -> None:
    """The workers that were to join end."""
    bench.switch(iteration=3)
    for number, host in enumerate(HOSTS, start=1):
        bench.beat(gone(number, 0, kind="left"), host=host)


def refuse(bench: Bench, generation: int, *, most: int) -> None:
    bench.report(GrowthRefused(most_workers=most, message=TEXT), generation=generation)


def test_a_growth_that_a_member_refuses_is_withdrawn_and_the_job_grows_as_far_as_it_can() -> None:
    bench = Bench(1)
    refuse(bench, growing(bench), most=3)
    assert numbers(bench) == [0]
    assert bench.newest().reason == f"withdrawn: {TEXT}"
    assert [item.reason for item in bench.histories["job-1"] if item.kind == "warning"] == [TEXT]
    leave(bench)
    assert numbers(bench) == [0, 4, 5]


def test_a_size_that_did_not_work_is_tried_again_after_a_while() -> None:
    bench = Bench(1)
    refuse(bench, growing(bench), most=1)
    leave(bench)
    bench.now += GROWTH_SECONDS - 1.0
    bench.beat(worker(0))
    for host in HOSTS:
        bench.beat(host=host)
    bench.tell(Tick())
    assert numbers(bench) == [0]
    bench.now += 1.0
    bench.tell(Tick())
    assert numbers(bench) == [0, 4, 5, 6]


def test_a_refusal_of_a_growth_that_is_not_the_newest_has_no_effect() -> None:
    bench = Bench(1)
    generation = growing(bench)
    refuse(bench, generation - 1, most=1)
    assert bench.newest().generation == generation


def test_a_job_never_shrinks_below_the_workers_that_it_has_because_of_a_refusal() -> None:
    bench = Bench(2)
    bench.submit()
    bench.activate()
    bench.host("host-2", 1)
    assert numbers(bench) == [0, 1, 2]
    refuse(bench, bench.newest().generation, most=1)
    assert numbers(bench) == [0, 1]


def test_a_start_that_is_refused_is_made_with_fewer_workers() -> None:
    bench = Bench(4)
    bench.submit()
    bench.listen()
    refuse(bench, bench.newest().generation, most=2)
    assert bench.newest().placements == ()
    bench.beat(*(gone(number, kind="exited") for number in range(4)))
    assert numbers(bench) == [4, 5]


def test_a_job_that_needs_more_workers_than_can_be_fails_with_the_reason() -> None:
    bench = Bench(4)
    bench.submit(min_workers=3)
    bench.listen()
    refuse(bench, bench.newest().generation, most=2)
    assert bench.records["job-1"].state is JobState.FAILED
    assert bench.records["job-1"].reason == TEXT
