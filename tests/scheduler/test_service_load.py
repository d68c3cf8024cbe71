"""A service has as many replicas as its requests need: more at once, fewer after a while."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from resile_scheduler.core.state.service_load import CALM_SECONDS, ServiceLoad
from resile_shared.messages.hosts import WorkerReport

from .test_core import Bench, worker
from .test_service_jobs import serving


def test_it_grows_at_once_and_shrinks_to_what_it_needed_at_most_in_the_last_seconds() -> None:
    load = ServiceLoad()
    found = []
    for now, in_flight in [(0, 0.0), (1, 5.0), (2, 2.0), (3, 0.5), (16, 0.0), (17, 0.0), (18, 0.0), (33, 0.0)]:
        load.see(1, in_flight)
        load.update({1}, per_replica=2.0, now=float(now))
        found.append(load.wanted)
    assert found == [0, 3, 3, 3, 1, 1, 0, 0]


def test_requests_of_all_replicas_count_but_of_none_that_is_gone() -> None:
    load = ServiceLoad()
    for number in (1, 2, 3):
        load.see(number, 1.5)
    assert load.update({1, 2}, per_replica=1.0, now=0.0)
    assert (load.wanted, load.in_flight) == (3, 3.0)
    assert not load.update({1, 2}, per_replica=1.0, now=1.0), "nothing has changed"


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 100.0)), min_size=1, max_size=50))
def test_it_never_wants_fewer_than_it_needs_nor_more_than_it_needed_lately(steps: list[tuple[float, float]]) -> None:
    load, now, needs = ServiceLoad(), 0.0, list[tuple[float, float]]()
    for seconds, in_flight in steps:
        now += seconds
        needs.append((now, in_flight))
        load.see(1, in_flight)
        load.update({1}, per_replica=1.0, now=now)
        lately = [need for time, need in needs if time > now - CALM_SECONDS]
        assert load.wanted is not None
        assert in_flight <= load.wanted <= ceil(max(lately))


def beat(bench: Bench, *in_flight: float) -> None:
    """Let the host report how many requests each replica of the newest membership has."""
    reports: list[WorkerReport] = []
    for placement, number in zip(bench.newest().placements, in_flight, strict=True):
        listed = worker(placement.worker, placement.slot, state="member")
        reports.append(listed.model_copy(update={"in_flight": number}))
    bench.beat(*reports)


def test_a_service_starts_with_its_minimum_and_follows_its_requests_up_to_its_maximum() -> None:
    bench = serving(Bench(4), least=1, most=3)
    assert len(bench.newest().placements) == 1
    beat(bench, 3.9)
    assert len(bench.newest().placements) == 2
    assert bench.newest().reason == "job-1 has 4 requests in flight"
    begin_all(bench)
    beat(bench, 50.0, 0.0)
    assert len(bench.newest().placements) == 3, "its maximum"


def test_a_service_without_requests_goes_back_to_its_minimum_after_a_while() -> None:
    bench = serving(Bench(4), least=2, most=4)
    beat(bench, 5.0, 5.0)
    assert len(bench.newest().placements) == 4
    begin_all(bench)
    beat(bench, 0.0, 0.0, 0.0, 0.0)
    assert len(bench.newest().placements) == 4
    bench.now += CALM_SECONDS
    beat(bench, 0.0, 0.0, 0.0, 0.0)
    assert len(bench.newest().placements) == 2


def begin_all(bench: Bench) -> None:
    bench.beat(*(worker(p.worker, p.slot) for p in bench.newest().placements))
    bench.switch(iteration=bench.newest().generation)
